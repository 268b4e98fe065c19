//! Tests of the simulated device: wrong bookkeeping gives wrong tokens, and steps take the time in the settings.

use std::time::Duration;

use tutti_kernels::{PageId, SamplingParams, SlotCopy};
use tutti_proto::cluster::v1::{MediaGrid, MediaKind};
use tutti_settings::SimProfile;

use super::*;

const PAGE_TOKENS: usize = 4;
const SLOTS: usize = 4;
const PAGES: [PageId; 3] = [PageId(2), PageId(5), PageId(1)];

fn settings() -> SimSettings {
    SimSettings { profile: SimProfile::Instant, ..SimSettings::default() }
}

fn options<'a>(dir: &'a Path, settings: &'a SimSettings, nodes: Option<&'a [String]>) -> SimOptions<'a> {
    SimOptions { dir, max_step_tokens: 64, page_tokens: PAGE_TOKENS, nodes, rank: 0, settings }
}

fn sim(settings: &SimSettings) -> Box<dyn Model> {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"vocab_size": 50, "max_position_embeddings": 12, "eos_token_id": 3}"#;
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let mut model = load(&options(dir.path(), settings, None)).unwrap();
    model.allocate_planes(8, SLOTS).unwrap();
    model
}

fn params(temperature: f32, seed: u64) -> SamplingParams {
    SamplingParams { temperature, seed, ..SamplingParams::GREEDY }
}

fn forward(model: &mut dyn Model, tokens: &[u32], start: usize) -> Result<(), DeviceError> {
    let row = RowInputs {
        first_token: 0,
        tokens: tokens.len(),
        start,
        slot: SlotId::NULL,
        continues: false,
        block_table: &PAGES,
    };
    let positions = vec![0.0; tokens.len()];
    let logit_rows = &[tokens.len() - 1];
    let positions = [&positions[..]; 3];
    let inputs =
        StepInputs { token_ids: tokens, positions, rows: &[row], copies: &[], logit_rows, shape: None };
    model.forward(&inputs, &[])
}

/// Runs a step without sampling a token.
fn compute(model: &mut dyn Model, tokens: &[u32], start: usize) {
    forward(model, tokens, start).unwrap();
    read(model, &LogitRequests::default());
}

fn read(model: &mut dyn Model, wanted: &LogitRequests<'_>) -> LogitResults {
    let mut out = LogitResults::default();
    model.read_logits(wanted, &mut out).unwrap();
    out
}

fn sample(model: &mut dyn Model, params: &SamplingParams, forbidden: &[u32]) -> u32 {
    let row = SampleRow {
        params,
        prompt: &[],
        output: &[],
        forbidden,
        allowed: None,
        position: 0,
        logprobs: Some(2),
    };
    read(model, &LogitRequests { sample: &[(0, row)], score: &[] }).sampled.remove(0).unwrap().token
}

#[test]
fn chunks_give_the_token_of_the_whole() {
    let tokens: Vec<u32> = (10..21).collect();
    let greedy = params(0.0, 9);
    let mut model = sim(&settings());
    forward(&mut *model, &tokens, 0).unwrap();
    let whole = sample(&mut *model, &greedy, &[]);
    for cut in 1..tokens.len() {
        let mut model = sim(&settings());
        compute(&mut *model, &tokens[..cut], 0);
        forward(&mut *model, &tokens[cut..], cut).unwrap();
        assert_eq!(sample(&mut *model, &greedy, &[]), whole, "cut at {cut}");
    }
}

#[test]
fn a_rank_that_follows_collects_steps_without_results() {
    let mut model = sim(&settings());
    for start in 0..3 {
        forward(&mut *model, &[7], start).unwrap();
        model.follow_logits(&WantedRows::default()).unwrap();
        let mut out = LogitResults::default();
        assert!(model.collect(None, &mut out).unwrap());
        assert!(out.sampled.is_empty() && out.scores.is_empty());
    }
}

#[test]
fn a_position_that_was_not_computed_shows() {
    let tokens: Vec<u32> = (10..21).collect();
    let greedy = params(0.0, 9);
    let mut model = sim(&settings());
    forward(&mut *model, &tokens, 0).unwrap();
    let whole = sample(&mut *model, &greedy, &[]);
    let mut model = sim(&settings());
    compute(&mut *model, &tokens[..5], 0);
    forward(&mut *model, &tokens[6..], 6).unwrap();
    assert_ne!(sample(&mut *model, &greedy, &[]), whole);
}

#[test]
fn the_seed_counts_unless_greedy_and_forbidden_tokens_do_not_come() {
    let mut model = sim(&settings());
    let mut sampled = |params: &SamplingParams, forbidden: &[u32]| {
        forward(&mut *model, &[7, 8, 9], 0).unwrap();
        sample(&mut *model, params, forbidden)
    };
    let greedy = sampled(&params(0.0, 1), &[]);
    assert_eq!(sampled(&params(0.0, 2), &[]), greedy);
    let seeded: Vec<u32> = (0..8).map(|seed| sampled(&params(1.0, seed), &[])).collect();
    assert!(seeded.iter().any(|token| *token != seeded[0]), "{seeded:?}");
    assert_eq!(sampled(&params(0.0, 1), &[greedy]), (greedy + 1) % 50);
}

#[test]
fn tokens_are_those_of_the_published_rule() {
    // From tests/cluster/lib/simulated.py: next_token([7, 8, 9], 0, 50) and next_token([7, 8, 9], 5, 50).
    let mut model = sim(&settings());
    for (temperature, token) in [(0.0, 42), (1.0, 2)] {
        forward(&mut *model, &[7, 8, 9], 0).unwrap();
        assert_eq!(sample(&mut *model, &params(temperature, 5), &[]), token);
    }
}

#[test]
fn steps_take_the_time_that_the_settings_say() {
    let settings = SimSettings {
        profile: SimProfile::Instant,
        fixed_us: Some(100),
        prefill_ns_per_token: Some(1000),
        prefill_ns_per_attended_token: Some(10),
        decode_ns_per_row: Some(500),
        decode_ns_per_attended_token: Some(3),
        ..SimSettings::default()
    };
    let row = |tokens, start| RowInputs {
        first_token: 0,
        tokens,
        start,
        slot: SlotId::NULL,
        continues: false,
        block_table: &PAGES,
    };
    // A token attends to itself, too. Three new tokens after two computed tokens attend to 3, 4 and 5 tokens.
    let exact = 100_000 + (500 + 7 * 3) + (3 * 1000 + 12 * 10);
    let rows = [row(1, 6), row(3, 2)];
    assert_eq!(SimClock::new(&settings, 0).step_time(&rows, 0), Duration::from_nanos(exact));
    let mut jittery = SimClock::new(&SimSettings { jitter_percent: 50, ..settings.clone() }, 0);
    let times: Vec<u64> = (0..100).map(|_| jittery.step_time(&rows, 0).as_nanos() as u64).collect();
    assert!(times.iter().all(|time| (exact..=exact + exact / 2).contains(time)), "{times:?}");
    assert!(times.iter().max().unwrap() - times.iter().min().unwrap() > exact / 4, "{times:?}");
}

#[test]
fn a_file_slows_the_ranks_that_it_names() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("slow");
    let settings = SimSettings { fixed_us: Some(1000), slow_file: Some(file.clone()), ..settings() };
    let busy = |rank| {
        let mut clock = SimClock::new(&settings, rank);
        clock.enqueue(&[], 0);
        clock.meter().busy()
    };
    assert_eq!([0, 1].map(busy), [Duration::from_millis(1); 2], "there is no file");
    std::fs::write(&file, "10 3\nnonsense\n1 20\n").unwrap();
    assert_eq!([0, 1, 10].map(busy), [1, 20, 3].map(Duration::from_millis));
    std::fs::remove_file(&file).unwrap();
    assert_eq!(busy(1), Duration::from_millis(1));
}

#[test]
fn faults_come_where_they_are_asked_for() {
    let outcomes = |settings: &SimSettings| -> Vec<Option<DeviceError>> {
        let mut model = sim(settings);
        (0..5)
            .map(|_| {
                let mut out = LogitResults::default();
                let outcome = forward(&mut *model, &[7, 8], 0);
                outcome.and_then(|()| model.read_logits(&LogitRequests::default(), &mut out)).err()
            })
            .collect()
    };
    let failed = |settings: &SimSettings| -> Vec<usize> {
        let outcomes = outcomes(settings);
        (0..5).filter(|&step| outcomes[step].is_some()).collect()
    };
    assert_eq!(failed(&SimSettings { fail_every: Some(2), ..settings() }), [2, 4]);
    assert_eq!(failed(&SimSettings { fail_on_token: Some(8), ..settings() }), [1, 2, 3, 4]);
    assert_eq!(failed(&SimSettings { fail_on_token: Some(9), ..settings() }), [0usize; 0]);
    let lost = outcomes(&SimSettings { lose_after: Some(3), ..settings() });
    assert!(matches!(lost[..], [None, None, None, None, Some(DeviceError::Lost(_))]), "{lost:?}");
}

#[test]
fn a_picture_has_the_tokens_of_its_grid() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"vocab_size": 50, "max_position_embeddings": 12, "image_token_id": 7, "audio_token_id": 8,
        "audio_bytes_per_token": 2, "vision_config": {"patch_size": 2, "out_hidden_size": 64}}"#;
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let load = |nodes: Option<&[String]>| load(&options(dir.path(), &settings(), nodes)).unwrap();
    assert_eq!(load(None).declaration().media().len(), 1, "a model without a preprocessor takes no pictures");
    let preprocessor = r#"{"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 16,
        "max_pixels": 64, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}"#;
    std::fs::write(dir.path().join("preprocessor_config.json"), preprocessor).unwrap();
    let (mut encoder, mut of_sound) =
        (load(Some(&["vision_encoder".into()])), load(Some(&["audio_encoder".into()])));
    let inputs: Vec<_> = encoder.declaration().media().iter().map(|input| (input.kind, input.walk)).collect();
    let [(MediaKind::Audio, sound), (MediaKind::Image, picture)] = inputs[..] else { panic!("{inputs:?}") };
    let item = |data| EncoderItem { data, grid: Some(MediaGrid { frames: 1, height: 2, width: 4 }) };
    let (mut rows, mut other) = (Vec::new(), Vec::new());
    encoder.encode(picture, &[item(&[1; 96])], None, &mut rows).unwrap();
    encoder.encode(picture, &[item(&[2; 96])], None, &mut other).unwrap();
    assert!(rows.len() == 2 * 4 && other.len() == 2 * 4 && rows != other);
    assert!(
        !encoder.has_thinker() && encoder.encode(sound, &[(&[1u8][..]).into()], None, &mut rows).is_err()
    );
    assert!(of_sound.encode(picture, &[item(&[1; 96])], None, &mut rows).is_err());
}

#[test]
fn audio_means_the_same_however_it_is_cut_and_all_of_it_counts() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"vocab_size": 50, "max_position_embeddings": 12, "audio_token_id": 7, "audio_bytes_per_token": 2}"#;
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let load = |nodes: Option<&[String]>| load(&options(dir.path(), &settings(), nodes)).unwrap();
    let (mut encoder, mut model) = (load(Some(&["audio_encoder".into()])), load(Some(&["thinker".into()])));
    model.allocate_planes(8, SLOTS).unwrap();
    let walk = model.declaration().media()[0].walk;
    assert!(!encoder.has_thinker() && model.encode(walk, &[(&[1u8][..]).into()], None, &mut vec![]).is_err());
    let mut token_after = |data: &[u8], cuts: &[usize]| {
        let mut rows = Vec::new();
        encoder.encode(walk, &[data.into()], None, &mut rows).unwrap();
        assert_eq!(rows.len(), 3 * 4);
        let tokens = [1, 7, 7, 7, 2];
        let mut start = 0;
        for &end in cuts {
            let row = RowInputs {
                first_token: 0,
                tokens: end - start,
                start,
                slot: SlotId::NULL,
                continues: false,
                block_table: &PAGES,
            };
            let positions = vec![0.0; end - start];
            let inputs = StepInputs {
                token_ids: &tokens[start..end],
                positions: [&positions[..]; 3],
                rows: &[row],
                copies: &[],
                logit_rows: &[end - start - 1],
                shape: None,
            };
            let of_media = start.max(1)..end.min(4);
            let values = rows.get((of_media.start - 1) * 4..(of_media.end - 1) * 4).unwrap_or_default();
            let embedded = EmbeddedRows { first_token: of_media.start - start, width: 4, values };
            let embedded = if of_media.is_empty() { vec![] } else { vec![embedded] };
            model.forward(&inputs, &embedded).unwrap();
            start = end;
            if start < tokens.len() {
                read(&mut *model, &LogitRequests::default());
            }
        }
        sample(&mut *model, &params(0.0, 0), &[])
    };
    let whole = token_after(&[1, 2, 3, 4, 5], &[5]);
    assert_eq!(token_after(&[1, 2, 3, 4, 5], &[1, 2, 4, 5]), whole);
    assert_ne!(token_after(&[1, 2, 3, 4, 6], &[5]), whole);
}

/// A step with one row of a request that has a slot.
struct Step<'a> {
    tokens: &'a [u32],
    start: usize,
    slot: u32,
    continues: bool,
    copies: &'a [(u32, u32)],
}

impl Step<'_> {
    fn forward(&self, model: &mut dyn Model) -> Result<(), DeviceError> {
        let Step { tokens, start, slot, continues, copies } = *self;
        let row = RowInputs {
            first_token: 0,
            tokens: tokens.len(),
            start,
            slot: SlotId(slot),
            continues,
            block_table: &PAGES,
        };
        let positions = vec![0.0; tokens.len()];
        let copy = |&(from, to): &(u32, u32)| SlotCopy { from: SlotId(from), to: SlotId(to) };
        let copies: Vec<SlotCopy> = copies.iter().map(copy).collect();
        let inputs = StepInputs {
            token_ids: tokens,
            positions: [&positions[..]; 3],
            rows: &[row],
            copies: &copies,
            logit_rows: &[tokens.len() - 1],
            shape: None,
        };
        model.forward(&inputs, &[])
    }

    /// Enqueues the step and the sampling of a greedy token after it.
    fn enqueue(&self, model: &mut dyn Model) {
        self.forward(model).unwrap();
        let params = params(0.0, 0);
        let row = SampleRow {
            params: &params,
            prompt: &[],
            output: &[],
            forbidden: &[],
            allowed: None,
            position: 0,
            logprobs: None,
        };
        model.enqueue_logits(&LogitRequests { sample: &[(0, row)], score: &[] }).unwrap();
    }
}

fn collect(model: &mut dyn Model) -> u32 {
    let mut out = LogitResults::default();
    assert!(model.collect(None, &mut out).unwrap());
    out.sampled.remove(0).unwrap().token
}

/// Returns the greedy tokens after a prompt. Computes each token in a step over all tokens before it.
fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let (mut model, mut tokens) = (sim(&settings()), prompt.to_vec());
    for _ in 0..count {
        forward(&mut *model, &tokens, 0).unwrap();
        tokens.push(sample(&mut *model, &params(0.0, 0), &[]));
    }
    tokens.split_off(prompt.len())
}

#[test]
fn a_row_that_continues_takes_the_token_that_its_slot_sampled() {
    for state in [false, true] {
        let mut model = sim(&SimSettings { steps_in_flight: 3, state, ..settings() });
        let expected = expected(&[7, 8, 9], 3);
        let step = Step { tokens: &[7, 8, 9], start: 0, slot: 2, continues: false, copies: &[] };
        step.enqueue(&mut *model);
        for start in [3, 4] {
            Step { tokens: &[0], start, slot: 2, continues: true, copies: &[] }.enqueue(&mut *model);
        }
        let refused = Step { tokens: &[0], start: 5, slot: 2, continues: true, copies: &[] };
        assert!(
            matches!(refused.forward(&mut *model), Err(DeviceError::Misuse(_))),
            "a fourth step in flight"
        );
        let tokens: Vec<u32> = (0..3).map(|_| collect(&mut *model)).collect();
        assert_eq!(tokens, expected);
        // A slot without a sampled token has no token to continue from.
        let nothing = Step { slot: 1, ..refused };
        assert!(matches!(nothing.forward(&mut *model), Err(DeviceError::Misuse(_))));
        refused.enqueue(&mut *model);
    }
}

#[test]
fn state_in_a_slot_shows_a_wrong_restore_and_a_step_that_ran_twice() {
    for entry_tokens in [1, 2, 4] {
        state_shows_faults(&SimSettings { state: true, entry_tokens, ..settings() });
    }
}

fn state_shows_faults(settings: &SimSettings) {
    let tokens: Vec<u32> = (10..21).collect();
    let expected = expected(&tokens, 1)[0];
    let token_after = |steps: &[Step<'_>]| {
        let mut model = sim(settings);
        let mut token = 0;
        for step in steps {
            step.enqueue(&mut *model);
            token = collect(&mut *model);
        }
        token
    };
    let row = |from: usize, to: usize, copies| Step {
        tokens: &tokens[from..to],
        start: from,
        slot: 1,
        continues: false,
        copies,
    };
    assert_eq!(token_after(&[row(0, 4, &[]), row(4, 11, &[])]), expected);
    // The state is saved to slot 3 after the first page, and restored from slot 3 to slot 2.
    let restored = Step { slot: 2, ..row(4, 11, &[(3, 2)]) };
    assert_eq!(token_after(&[row(0, 4, &[]), row(4, 9, &[(1, 3)]), restored]), expected);
    // These are errors: a save one step too late, a missing restore, and a new request without a zero state.
    let late = Step { slot: 2, ..row(4, 11, &[(3, 2)]) };
    assert_ne!(token_after(&[row(0, 4, &[]), row(4, 9, &[]), row(9, 10, &[(1, 3)]), late]), expected);
    assert_ne!(token_after(&[row(0, 4, &[]), Step { slot: 2, ..row(4, 11, &[]) }]), expected);
    assert_ne!(token_after(&[row(0, 4, &[]), row(0, 11, &[])]), expected);
    assert_eq!(token_after(&[row(0, 4, &[]), row(0, 11, &[(0, 1)])]), expected);
    // A row that runs twice does no harm to pages, but makes the state wrong.
    assert_ne!(token_after(&[row(0, 4, &[]), row(4, 6, &[]), row(4, 6, &[]), row(6, 11, &[])]), expected);
}

#[test]
fn a_slot_travels_as_the_bytes_of_its_state() {
    for entry_tokens in [1, 2, 4] {
        slot_travels(&SimSettings { state: true, entry_tokens, ..settings() });
    }
}

fn slot_travels(settings: &SimSettings) {
    let (mut model, mut other) = (sim(settings), sim(&self::settings()));
    let step = Step { tokens: &[7, 8, 9], start: 0, slot: 1, continues: false, copies: &[] };
    step.enqueue(&mut *model);
    let token = collect(&mut *model);
    let mut state = Vec::new();
    model.read_slot(SlotId(1), &mut state).unwrap();
    assert_eq!(state.len() as u64, model.declaration().slot_bytes());
    model.write_slot(SlotId(2), &state).unwrap();
    let next = Step { tokens: &[token], start: 3, slot: 2, continues: false, copies: &[] };
    next.enqueue(&mut *model);
    assert_eq!(collect(&mut *model), expected(&[7, 8, 9], 2)[1]);
    assert!(model.write_slot(SlotId(2), &state[1..]).is_err());
    assert!(model.write_slot(SlotId(SLOTS as u32), &state).is_err());
    assert!(model.write_slot(SlotId::NULL, &state).is_err());
    state.clear();
    other.read_slot(SlotId(1), &mut state).unwrap();
    assert!(state.is_empty() && other.write_slot(SlotId(1), &[1]).is_err());
}

#[test]
fn steps_run_one_after_another_on_the_timeline_and_their_ends_are_known_late() {
    let settings = SimSettings { fixed_us: Some(40_000), late_us: 20_000, steps_in_flight: 2, ..settings() };
    let mut model = sim(&settings);
    let began = Instant::now();
    for start in [0, 3] {
        Step { tokens: &[7, 8, 9], start, slot: 1, continues: false, copies: &[] }.enqueue(&mut *model);
    }
    let mut out = LogitResults::default();
    assert!(!model.collect(Some(began), &mut out).unwrap(), "the first step is not done");
    assert!(out.is_empty());
    assert!(model.collect(None, &mut out).unwrap());
    assert!(began.elapsed() >= Duration::from_millis(60));
    assert!(model.collect(None, &mut out).unwrap());
    assert!(began.elapsed() >= Duration::from_millis(100));
    assert_eq!(out.sampled.len(), 2);
}
