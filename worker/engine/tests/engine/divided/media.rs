//! Tests of media items that are encoded together. The items run in one encoder call, even beyond the step budget. A
//! call beyond the encoder's own limit is refused.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
};

use serde_json::json;
use tutti_engine::{Engine, EngineSettings};
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_models::{EncoderItem, LoadFormat, LoadOptions, Model, Quantize, load};
use tutti_proto::{
    Rank,
    cluster::v1::{self as pb, completion::Outcome},
    declaration::WalkId,
};
use tutti_settings::{ByteSize, MediaPrefill};
use tutti_transfer::{Event, UnitKind};

use super::{Answers, Side, carry, key};
use crate::common::{DECODE, PREFILL, RequestResults, launch, settings, token_bits, with_logprobs};

const PLACEHOLDER: u32 = 499;
const BYTES_PER_TOKEN: usize = 8;
/// Id of the encoder's walk.
const ENCODE: u32 = 3;

fn model(encoded_together: bool, max_call_tokens: Option<u32>) -> Box<dyn Model> {
    let dir = tempfile::tempdir().expect("a directory");
    let config = json!({
        "architectures": ["TuttiMediaTestForCausalLM"], "model_type": "tutti_media_test", "torch_dtype": "float32",
        "vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": false, "hidden_act": "silu",
        "attention_bias": false, "audio_token_id": PLACEHOLDER, "audio_bytes_per_token": BYTES_PER_TOKEN,
        "audio_encoded_together": encoded_together, "audio_max_call_tokens": max_call_tokens,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("it is writable");
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir: dir.path().into(),
        load_format: LoadFormat::Dummy,
        quantize: Quantize::None,
        max_step_tokens: 64,
        page_tokens: 16,
        expert_parallel: false,
        nodes: None,
        seed: 5,
    };
    let device = CpuDevice::new(1, Isa::detect()).expect("there is a CPU");
    load(&options, device, &mut |_| {}).expect("the config is sound")
}

fn side(model: Box<dyn Model>, settings: &EngineSettings) -> Side {
    let kv_cache_memory = Some(ByteSize(65 * model.page_bytes() as u64));
    let settings = EngineSettings { kv_cache_memory, ..settings.clone() };
    Side::of(Engine::new(model, Rank(0), &settings, 64).expect("sound settings"))
}

/// A request with two tokens of text before each item and three after the last. All requests have the same text.
fn request(request: u64, items: &[Vec<u8>]) -> pb::LaunchGraph {
    let digest = |data: &Vec<u8>| BuildHasherDefault::<DefaultHasher>::default().hash_one(data).to_le_bytes();
    let mut whole = with_logprobs(launch(request, 1, 5));
    whole.key.as_mut().unwrap().graph = 1;
    let spec = whole.spec.as_mut().unwrap();
    // All requests have the same seed, so that equal requests have equal results.
    spec.sampling.as_mut().unwrap().seed = 7;
    spec.prompt.clear();
    for data in items {
        let tokens = data.len().div_ceil(BYTES_PER_TOKEN);
        spec.prompt.extend([3, 4]);
        spec.media.push(pb::MediaItem {
            kind: pb::MediaKind::Audio.into(),
            format: "wav".into(),
            data: data.clone().into(),
            digest: [digest(data), digest(data)].concat(),
            runs: vec![pb::MediaRun { first: spec.prompt.len() as u32, tokens: tokens as u32 }],
            ..Default::default()
        });
        spec.prompt.resize(spec.prompt.len() + tokens, PLACEHOLDER);
    }
    spec.prompt.extend([5, 6, 7]);
    pb::LaunchGraph { walks: vec![PREFILL, DECODE], ..whole }
}

/// Returns the graph that waits for the embeddings.
fn awaiting(whole: &pb::LaunchGraph) -> pb::LaunchGraph {
    let receive_media = Some(pb::PlaneReservation { secret: vec![0; 16], lease_ms: 1000 });
    pb::LaunchGraph { receive_media, ..whole.clone() }
}

/// Returns the graph that encodes the items.
fn encode(whole: &pb::LaunchGraph) -> pb::LaunchGraph {
    let key = whole.key.map(|key| pb::GraphKey { graph: 0, ..key });
    let send_to = Some(pb::PlaneDestination { secret: vec![0; 16], ..Default::default() });
    pb::LaunchGraph { key, walks: vec![ENCODE], send_to, ..whole.clone() }
}

struct Ran {
    results: BTreeMap<u64, RequestResults>,
    /// Embeddings of each request, as bytes.
    embeddings: BTreeMap<u64, Vec<u8>>,
    cached_tokens: u64,
    /// Counts of the encoding side.
    encoders: pb::EncoderCounts,
}

/// Runs all requests on the encoding and the prefilling side. Launches the next request in each turn in which
/// `launches_next` returns true.
fn run(
    (mut from, mut to): (Side, Side),
    launches: &[pb::LaunchGraph],
    mut launches_next: impl FnMut(&Side) -> bool,
) -> Ran {
    let (answers, mut embeddings, mut waiting) = (Answers::default(), BTreeMap::new(), launches.iter());
    for turn in 0.. {
        assert!(turn < 20_000, "{:?} {:?} {:?}", from.outcomes, to.outcomes, to.load);
        if launches_next(&to)
            && let Some(whole) = waiting.next()
        {
            to.engine.launch(awaiting(whole));
        }
        let reserved: Vec<_> = to.connector.lock().reserved.drain(..).collect();
        for (key, ..) in reserved {
            let of_key = |whole: &&pb::LaunchGraph| whole.key.unwrap().request == key.request.0;
            from.engine.launch(encode(launches.iter().find(of_key).unwrap()));
        }
        let (a, b) = (from.step(), to.step());
        for (run, data) in &from.connector.lock().sent {
            assert_eq!(run.kind, UnitKind::Embeddings);
            let bytes: &mut Vec<u8> = embeddings.entry(run.key.request.0).or_default();
            assert_eq!(run.first * 32 * 4, bytes.len(), "in order");
            bytes.extend(data);
        }
        for request in carry(&from, &to, &answers) {
            from.give(Event::Accepted(key(request, 0)));
        }
        if !a && !b && to.outcomes.len() == launches.len() {
            break;
        }
    }
    assert!(answers.lock().unwrap().iter().all(Result::is_ok));
    assert!(to.outcomes.values().all(|outcome| matches!(outcome, Outcome::Finished(_))));
    let results =
        to.tokens.iter().map(|(request, tokens)| (*request, tokens.iter().map(token_bits).collect()));
    Ran {
        results: results.collect(),
        embeddings,
        cached_tokens: to.load.cached_tokens,
        encoders: from.load.encoders.unwrap_or_default(),
    }
}

/// A xorshift pseudo-random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % bound
    }
}

#[test]
fn one_call_takes_all_items_of_a_request_whatever_the_budget_of_a_step() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    // There are few different items, so that some requests begin with equal items and differ in later ones.
    let mut item = |tokens: usize| -> Vec<u8> {
        (0..tokens * BYTES_PER_TOKEN - 3).map(|_| random.below(256) as u8).collect()
    };
    let items = [item(33), item(33), item(1), item(5), item(20)];
    let chosen =
        [&[0, 1][..], &[0, 4], &[0, 1], &[0, 1, 2], &[0], &[2, 3, 2, 3], &[3], &[4, 0], &[2, 3, 2], &[0, 4]];
    let launches: Vec<_> = (1..)
        .zip(chosen)
        .map(|(id, chosen)| {
            request(id, &chosen.iter().map(|index| items[*index].clone()).collect::<Vec<_>>())
        })
        .collect();
    let alone_settings = EngineSettings {
        no_prefix_cache: true,
        max_step_tokens: 64,
        encoder_cache_memory: ByteSize(0),
        ..settings()
    };
    let sides =
        |settings: &EngineSettings| (side(model(true, None), settings), side(model(true, None), settings));
    let mut started = 0;
    let alone = run(sides(&alone_settings), &launches, |to| {
        let is_next = to.outcomes.len() == started;
        started += usize::from(is_next);
        is_next
    });

    let mut encoder = model(true, None);
    for launch in &launches {
        let items: Vec<EncoderItem<'_>> =
            launch.spec.as_ref().unwrap().media.iter().map(|item| (&item.data[..]).into()).collect();
        let (mut joint, mut separate) = (vec![], vec![]);
        encoder.encode(WalkId(ENCODE), &items, None, &mut joint).unwrap();
        items.iter().for_each(|item| encoder.encode(WalkId(ENCODE), &[*item], None, &mut separate).unwrap());
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let request = launch.key.unwrap().request;
        assert!(alone.embeddings[&request] == bytes(&joint), "request {request}");
        assert_eq!(items.len() > 1, bytes(&joint) != bytes(&separate), "request {request}");
    }

    assert_eq!(alone.encoders, pb::EncoderCounts { misses: 10, ..Default::default() });

    let mut cached = 0;
    for round in 0..12 {
        // Room for some of the calls, and for all.
        let encoder_cache_memory = ByteSize([8 << 10, 1 << 20][round % 2]);
        let settings = EngineSettings {
            encoder_cache_memory,
            media_prefill: [MediaPrefill::Chunked, MediaPrefill::Atomic][round / 2 % 2],
            max_step_tokens: 4 + random.below(61),
            max_running_requests: Some(4),
            max_prefill_chunk_size: Some(1 + random.below(40)),
            ..settings()
        };
        let eagerness = 1 + random.below(8);
        let ran = run(sides(&settings), &launches, |_| random.below(eagerness) == 0);
        assert!(ran.embeddings == alone.embeddings, "round {round}: {settings:?}");
        for (request, results) in &alone.results {
            assert!(ran.results[request] == *results, "round {round}, request {request}: {settings:?}");
        }
        cached += ran.cached_tokens;
        let pb::EncoderCounts { hits, misses, bytes, .. } = ran.encoders;
        assert_eq!(hits + misses, 10, "round {round}");
        assert!(0 < bytes && bytes <= encoder_cache_memory.0, "round {round}: {bytes} bytes");
        // The first and third and the second and tenth request have equal media.
        assert!(round % 2 == 0 || hits == 2, "round {round}: {hits} hits");
    }
    assert_eq!(alone.results[&1], alone.results[&3]);
    assert_ne!(alone.results[&1], alone.results[&2]);
    assert!(cached > 0, "equal requests share a prefix");
}

#[test]
fn a_call_over_the_limit_of_the_encoder_is_refused_at_launch() {
    let item = |tokens: usize| vec![1; tokens * BYTES_PER_TOKEN];
    let refused = |side: &mut Side, items: &[usize]| {
        let items: Vec<_> = items.iter().map(|tokens| item(*tokens)).collect();
        side.engine.launch(encode(&request(1, &items)));
        side.idle();
        match side.outcomes.remove(&1) {
            Some(Outcome::Refused(fault)) => Some((fault.field, fault.message)),
            Some(outcome) => panic!("{outcome:?}"),
            None => {
                side.give(Event::Accepted(key(1, 0)));
                side.idle();
                assert!(matches!(side.outcomes.remove(&1), Some(Outcome::HandedOver(_))));
                None
            }
        }
    };
    let why = |field: &str, tokens: usize| {
        let message = format!("{tokens} tokens are encoded in one call, but the encoder takes at most 70");
        Some((field.to_owned(), message))
    };
    // The encoder's limit, 70 tokens, is above the budget of a step, 16 tokens.
    let (mut joint, mut separate) =
        (side(model(true, Some(70)), &settings()), side(model(false, Some(70)), &settings()));
    assert_eq!(refused(&mut joint, &[30, 40]), None);
    assert_eq!(refused(&mut joint, &[30, 1, 40]), why("media", 71));
    assert_eq!(refused(&mut joint, &[71]), why("media[0]", 71));
    assert_eq!(refused(&mut separate, &[30, 1, 40, 70]), None);
    assert_eq!(refused(&mut separate, &[30, 71]), why("media[1]", 71));
}
