//! Tests of real families with media, from the wire's items to tokens: the engine gets the embeddings of transformers,
//! and computes positions, chunks and features. Prompt logprobs and greedy tokens are those of transformers.

use std::{collections::BTreeMap, fs, ops::Range, path::Path, path::PathBuf};

use safetensors::SafeTensors;
use serde_json::json;
use tutti_engine::{Engine, EngineSettings};
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_models::{LoadFormat, LoadOptions, Model, Quantize, load};
use tutti_proto::{
    Rank,
    cluster::v1::{self as pb, MediaKind, completion::Outcome},
    declaration::WalkId,
};
use tutti_settings::ByteSize;
use tutti_transfer::{Extent, HandOver, Run, UnitKind};

use super::{Answers, Side, arrived, import, key};
use crate::common::{DECODE, PREFILL, launch, settings};

/// Ids of the placeholders in the goldens' prompts.
const PLACEHOLDERS: [(u32, MediaKind); 3] =
    [(300, MediaKind::Audio), (301, MediaKind::Image), (302, MediaKind::Video)];
/// Patches per side of a token.
const MERGE: u32 = 2;
/// Width of the golden models' residual stream.
const HIDDEN: usize = 64;
/// Greatest difference of a logprob from transformers'.
const BOUND: f32 = 2e-4;

/// A folder with the files of a golden model and a `preprocessor_config.json`, which the goldens lack.
fn checkpoint(golden: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        std::os::unix::fs::symlink(golden.join(file), dir.path().join(file)).expect("a link");
    }
    let preprocessor = json!({
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": MERGE,
        "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 65536,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16,
    });
    fs::write(dir.path().join("preprocessor_config.json"), preprocessor.to_string()).expect("it is writable");
    dir
}

fn thinker(dir: &Path) -> Box<dyn Model> {
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir: dir.into(),
        load_format: LoadFormat::Auto,
        quantize: Quantize::None,
        max_step_tokens: 64,
        page_tokens: 16,
        expert_parallel: false,
        nodes: Some(vec!["thinker".into()]),
        seed: 5,
    };
    let device = CpuDevice::new(1, Isa::detect()).expect("there is a CPU");
    load(&options, device, &mut |_| {}).expect("the checkpoint is sound")
}

struct Goldens<'a>(SafeTensors<'a>);

impl Goldens<'_> {
    fn bytes<const N: usize>(&self, name: &str) -> Vec<[u8; N]> {
        self.0.tensor(name).map_or(Vec::new(), |tensor| tensor.data().as_chunks().0.to_vec())
    }

    fn integers(&self, name: &str) -> Vec<u32> {
        self.bytes(name).into_iter().map(|bytes| i64::from_le_bytes(bytes) as u32).collect()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).into_iter().map(f32::from_le_bytes).collect()
    }

    /// Returns the rows of all items of a kind: each embedding with its features.
    fn rows(&self, case: &str, kind: MediaKind) -> Vec<Vec<f32>> {
        let kind = kind.as_str_name().to_lowercase();
        let mut levels = vec![self.floats(&format!("{case}.{kind}_embeds"))];
        let features = (0..).map(|level| self.floats(&format!("{case}.{kind}_deepstack.{level}")));
        levels.extend(features.take_while(|level| !level.is_empty()));
        let row =
            |token: usize| levels.iter().flat_map(move |level| level[token * HIDDEN..][..HIDDEN].to_vec());
        (0..levels[0].len() / HIDDEN).map(|token| row(token).collect()).collect()
    }
}

/// Returns the ranges of consecutive indices.
fn runs(indices: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for &index in indices {
        match runs.last_mut().filter(|run| run.end == index) {
            Some(run) => run.end += 1,
            None => runs.push(index..index + 1),
        }
    }
    runs
}

fn item(kind: MediaKind, runs: &[Range<usize>]) -> pb::MediaItem {
    let run = |run: &Range<usize>| pb::MediaRun { first: run.start as u32, tokens: run.len() as u32 };
    pb::MediaItem { kind: kind.into(), runs: runs.iter().map(run).collect(), ..Default::default() }
}

/// Returns the items of a golden case, as a router sends them, and the rows of each.
fn items(goldens: &Goldens<'_>, case: &str, ids: &[u32]) -> Vec<(pb::MediaItem, Vec<f32>)> {
    let mut all = Vec::new();
    for (placeholder, kind) in PLACEHOLDERS {
        let indices: Vec<usize> = (0..ids.len()).filter(|&index| ids[index] == placeholder).collect();
        let mut rows = goldens.rows(case, kind).into_iter();
        let mut take = |tokens: usize| rows.by_ref().take(tokens).flatten().collect::<Vec<f32>>();
        if kind == MediaKind::Audio {
            let runs = runs(&indices);
            let of_items: Vec<&[Range<usize>]> = match case {
                "audio_in_video" => vec![&runs],
                _ => runs.chunks(1).collect(),
            };
            for runs in of_items.into_iter().filter(|runs| !runs.is_empty()) {
                all.push((item(kind, runs), take(runs.iter().map(Range::len).sum())));
            }
            continue;
        }
        let name = kind.as_str_name().to_lowercase();
        let seconds = goldens.floats(&format!("{case}.second_per_grid"));
        let mut left = &indices[..];
        for (index, grid) in goldens.integers(&format!("{case}.{name}_grid_thw")).chunks(3).enumerate() {
            let [frames, height, width] = [grid[0], grid[1], grid[2]];
            let tokens = (frames * height * width / (MERGE * MERGE)) as usize;
            let (own, rest) = left.split_at(tokens);
            left = rest;
            let mut item = item(kind, &runs(own));
            item.grid = Some(pb::MediaGrid { frames, height, width });
            item.seconds_per_grid =
                (kind == MediaKind::Video).then(|| seconds.get(index).copied().unwrap_or(1.0));
            all.push((item, take(tokens)));
        }
        assert!(left.is_empty(), "{case}: tokens of no grid");
    }
    all.sort_by_key(|(item, _)| item.runs[0].first);
    for (index, (item, _)) in all.iter_mut().enumerate() {
        item.digest = vec![index as u8 + 1; 16];
    }
    all
}

struct Case {
    launch: pb::LaunchGraph,
    /// The items' rows, in the order of calls.
    rows: Vec<f32>,
    greedy: Vec<u32>,
    /// Logprob of each token of the prompt but the first.
    logprobs: Vec<f32>,
}

fn case(goldens: &Goldens<'_>, name: &str, request: u64, model: &dyn Model) -> Case {
    let ids = goldens.integers(&format!("{name}.input_ids"));
    let greedy = goldens.integers(&format!("{name}.greedy"));
    let (items, rows): (Vec<_>, Vec<_>) = items(goldens, name, &ids).into_iter().unzip();
    let calls = model.declaration().encoder_calls(&items).expect("the model takes the items");
    let rows = calls.iter().flat_map(|call| &call.items).flat_map(|index| rows[*index].clone()).collect();
    let vocab = model.limits().vocab_size;
    let logits = goldens.floats(&format!("{name}.logits"));
    let logprob = |index: usize| {
        let row: Vec<f64> = logits[index * vocab..][..vocab].iter().map(|x| f64::from(*x)).collect();
        let most = row.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
        (row[ids[index + 1] as usize] - most - sum.ln()) as f32
    };
    let mut launch = launch(request, 1, greedy.len() as u32);
    launch.key.as_mut().unwrap().graph = 1;
    launch.walks = vec![PREFILL, DECODE];
    launch.receive_media = Some(pb::PlaneReservation { secret: vec![0; 16], lease_ms: 1000 });
    let spec = launch.spec.as_mut().unwrap();
    spec.sampling.as_mut().unwrap().temperature = 0.0;
    spec.stopping.as_mut().unwrap().ignore_eos = true;
    (spec.prompt, spec.media, spec.prompt_logprobs) = (ids.clone(), items, Some(0));
    Case { launch, rows, greedy, logprobs: (0..ids.len() - 1).map(logprob).collect() }
}

/// Runs a case alone. Returns its tokens and the logprobs of its prompt.
fn run(side: &mut Side, case: &Case, unit: usize) -> (Vec<u32>, Vec<f32>) {
    let request = case.launch.key.unwrap().request;
    side.engine.launch(case.launch.clone());
    side.idle();
    let units = case.rows.len() / unit;
    assert_eq!(
        side.connector.lock().reserved.drain(..).map(|(_, units, _)| units).collect::<Vec<_>>(),
        [units]
    );
    let data = case.rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    let (kind, extent) = (UnitKind::Embeddings, Extent::Whole);
    side.give(arrived((Run { key: key(request, 1), kind, extent, first: 0, count: units }, data)));
    let answers = Answers::default();
    side.give(import(request, HandOver { first: None, computed: units, pages: units, slots: 0 }, &answers));
    let mut scored: BTreeMap<u32, f32> = BTreeMap::new();
    while !side.outcomes.contains_key(&request) {
        for piece in side.step_with_scores() {
            let logprobs = piece.tokens.into_iter().map(|token| token.logprob);
            scored.extend((piece.first..).zip(logprobs));
        }
    }
    assert!(answers.lock().unwrap().iter().all(Result::is_ok), "{:?}", answers.lock().unwrap());
    assert!(matches!(side.outcomes[&request], Outcome::Finished(_)), "{:?}", side.outcomes[&request]);
    (side.ids(request), scored.into_values().collect())
}

#[test]
fn prompts_with_media_have_the_tokens_of_transformers_whatever_the_chunks() {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let omni = ["audio", "audio_short", "image", "video", "mixed", "audio_in_video", "tall_video"];
    let vl = ["image", "images_video"];
    for (model, cases) in [("qwen3_omni", &omni[..]), ("qwen3_vl", &vl), ("qwen3_vl_moe", &vl)] {
        let golden = root.join(model);
        let bytes = fs::read(golden.join("goldens.safetensors")).unwrap();
        let goldens = Goldens(SafeTensors::deserialize(&bytes).unwrap());
        let dir = checkpoint(&golden);
        let mut worst = 0f32;
        let mut expected: BTreeMap<&str, (Vec<u32>, Vec<u32>)> = BTreeMap::new();
        for chunk in [64, 16, 5, 1] {
            let loaded = thinker(dir.path());
            assert!(loaded.declaration().encodes(WalkId(3)), "{model} declares its encoders");
            let unit = loaded.declaration().embedding_unit();
            let cases: Vec<(&str, Case)> = cases
                .iter()
                .zip(1..)
                .map(|(name, request)| (*name, case(&goldens, name, request, &*loaded)))
                .collect();
            let settings = EngineSettings {
                max_step_tokens: 64,
                max_prefill_chunk_size: Some(chunk),
                kv_cache_memory: Some(ByteSize(65 * loaded.page_bytes() as u64)),
                no_prefix_cache: true,
                ..settings()
            };
            let mut side = Side::of(Engine::new(loaded, Rank(0), &settings, 64).expect("sound settings"));
            for (name, case) in cases {
                let (tokens, logprobs) = run(&mut side, &case, unit);
                assert_eq!(tokens, case.greedy, "{model} {name}, chunks of {chunk}");
                assert_eq!(logprobs.len(), case.logprobs.len(), "{model} {name}");
                worst =
                    logprobs.iter().zip(&case.logprobs).fold(worst, |worst, (a, b)| worst.max((a - b).abs()));
                let bits = (tokens, logprobs.iter().map(|x| x.to_bits()).collect());
                let first = expected.entry(name).or_insert_with(|| bits.clone());
                assert!(*first == bits, "{model} {name}: other bits in chunks of {chunk}");
            }
        }
        eprintln!("{model}: greatest |Δ| of a logprob {worst:.2e}");
        assert!(worst < BOUND, "{model}: {worst}");
    }
}
