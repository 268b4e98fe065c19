//! Tests of batch invariance with engine, scheduler and a real model. A request's results are bit-identical for any
//! step budget, any chunks, any other requests in the batch, and any earlier use of its pages.

use std::collections::BTreeMap;

use tutti_engine::{Engine, EngineSettings};
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_models::{LoadFormat, LoadOptions, Quantize, load};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_settings::{ByteSize, Chunking};

use crate::common::{self, launch, run_to_end, with_logprobs};

/// Shape of a small Qwen3 with random weights.
const CONFIG: &str = r#"{
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32",
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu",
    "attention_bias": false, "eos_token_id": 0
}"#;

const MAX_STEP_TOKENS: usize = 64;

/// The largest fixed shape, in tokens, that the model has buffers for.
const MOST_PADDED: usize = 96;

fn engine(max_step_tokens: usize, max_prefill_chunk_size: Option<usize>) -> Engine {
    engine_with(EngineSettings { max_step_tokens, max_prefill_chunk_size, ..common::settings() })
}

fn engine_with(settings: EngineSettings) -> Engine {
    engine_of(CONFIG, settings)
}

fn engine_of(config: &str, settings: EngineSettings) -> Engine {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("config.json"), config).expect("it is writable");
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir: dir.path().into(),
        load_format: LoadFormat::Dummy,
        quantize: Quantize::None,
        max_step_tokens: MOST_PADDED,
        page_tokens: 16,
        expert_parallel: false,
        nodes: None,
        seed: 5,
    };
    let device = CpuDevice::new(1, Isa::detect()).expect("there is a CPU");
    let model = load(&options, device, &mut |_| {}).expect("the config is sound");
    let page_bytes = model.page_bytes() as u64;
    let settings = EngineSettings {
        max_running_requests: Some(4),
        // The pool has fewer pages than the requests need in total, so that several requests use each page.
        kv_cache_memory: Some(ByteSize(24 * page_bytes)),
        ..settings
    };
    let mut engine = Engine::new(model, Rank(0), &settings, 64).expect("sound settings");
    engine.warm_up().expect("the device is there");
    engine
}

#[test]
fn results_are_bit_identical_for_any_batching() {
    let launches: Vec<_> = [1, 2, 15, 16, 17, 33, 64, 65, 90]
        .iter()
        .zip(1..)
        .map(|(&prompt, request)| {
            let mut launch = launch(request, prompt, 12);
            let spec = launch.spec.as_mut().expect("the launch has a spec");
            (spec.logprobs, spec.prompt_logprobs) = (Some(4), (request % 2 == 1).then_some(4));
            launch
        })
        .collect();
    let mut alone = engine(MAX_STEP_TOKENS, None);
    let mut expected = BTreeMap::new();
    for launch in &launches {
        expected.extend(run_to_end(&mut alone, std::slice::from_ref(launch)).results);
    }
    assert_eq!(expected.len(), launches.len());
    assert_eq!(expected[&9].len(), 89 + 12);
    for (max_step_tokens, max_prefill_chunk_size) in
        [(64, None), (64, Some(7)), (8, None), (8, Some(3)), (1, None)]
    {
        let mut engine = engine(max_step_tokens, max_prefill_chunk_size);
        let results = run_to_end(&mut engine, &launches).results;
        assert!(results == expected, "steps of {max_step_tokens}, chunks of {max_prefill_chunk_size:?}");
    }
}

#[test]
fn the_first_report_has_the_loads_of_experts_without_the_warm_up() {
    let mut config: serde_json::Value = serde_json::from_str(CONFIG).expect("it is JSON");
    for (key, value) in [
        ("architectures", serde_json::json!(["Qwen3MoeForCausalLM"])),
        ("num_experts", 4.into()),
        ("num_experts_per_tok", 2.into()),
        ("moe_intermediate_size", 8.into()),
    ] {
        config[key] = value;
    }
    let mut engine = engine_of(
        &config.to_string(),
        EngineSettings { max_step_tokens: MAX_STEP_TOKENS, ..common::settings() },
    );
    engine.launch(launch(1, 10, 3));
    let loads = engine.step().expect("the device is there").expect("a step ran").expert_loads;
    // The first layer computes ten tokens with two experts each. The last layer mixes experts only for the one token
    // whose logits are needed.
    let counts: Vec<_> = loads.iter().map(|load| (load.layer, load.experts, load.tokens)).collect();
    assert_eq!(counts, [(0, 4, 20), (1, 4, 2)]);
    assert_eq!(loads[1].most, 1);
    assert!((5..=10).contains(&loads[0].most), "{loads:?}");
}

#[test]
fn fixed_shapes_change_no_bit_and_their_padding_is_counted() {
    let launches: Vec<_> = [1, 15, 16, 33, 64, 90]
        .iter()
        .zip(1..)
        .map(|(&prompt, request)| with_logprobs(launch(request, prompt, 12)))
        .collect();
    let again = |launch: &pb::LaunchGraph| {
        let mut launch = launch.clone();
        launch.key.as_mut().expect("the launch has a key").request += 100;
        launch
    };
    let warm: Vec<_> = launches.iter().map(again).collect();
    let mut plain = engine(MAX_STEP_TOKENS, None);
    let expected = run_to_end(&mut plain, &launches).results;
    for (shapes, chunking, max_step_tokens) in [
        ("96", Chunking::Scheduler, 64),
        ("1,2,3,64", Chunking::Scheduler, 64),
        ("8,32,96", Chunking::Scheduler, 64),
        ("8,32,96", Chunking::Engine, 8),
        ("8,32,96", Chunking::Off, 64),
        ("1", Chunking::Scheduler, 1),
    ] {
        let chunk_shapes = Some(shapes.parse().expect("sound shapes"));
        let settings = EngineSettings { max_step_tokens, chunking, chunk_shapes, ..common::settings() };
        let mut engine = engine_with(settings);
        // In the second run the prefix cache has whole pages of the prompts.
        for (launches, is_warm) in [(&launches, false), (&warm, true)] {
            let ran = run_to_end(&mut engine, launches);
            let offset = if is_warm { 100 } else { 0 };
            for (request, expected) in &expected {
                assert!(
                    ran.results[&(request + offset)] == *expected,
                    "{shapes}, {chunking}, request {request}"
                );
            }
            assert_eq!(ran.load.cached_tokens > 0, is_warm, "{shapes}");
        }
    }
}

/// A step's padding is the difference between the tokens of its forwards and the tokens of the forwards' shapes.
#[test]
fn each_step_reports_its_padding() {
    let chunk_shapes = Some("8,32,96".parse().expect("sound shapes"));
    let settings = EngineSettings { max_step_tokens: 64, chunk_shapes, ..common::settings() };
    let mut engine = engine_with(settings);
    engine.launch(launch(1, 90, 3));
    let mut padded = Vec::new();
    while let Some(report) = engine.step().expect("the device is there") {
        let work = report.work.expect("a step ran");
        padded.push((work.tokens, work.padding_tokens));
    }
    assert_eq!(padded, [(64, 32), (26, 6), (1, 7), (1, 7)]);
    let mut plain = engine_with(EngineSettings { max_step_tokens: 64, ..common::settings() });
    plain.launch(launch(1, 90, 3));
    while let Some(report) = plain.step().expect("the device is there") {
        assert_eq!(report.work.expect("a step ran").padding_tokens, 0);
    }
}
