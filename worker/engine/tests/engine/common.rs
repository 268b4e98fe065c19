//! Engines of the test model ([`model`]), requests, and their correct results.

mod constrained;
mod model;
mod outcomes;
mod stateful;

use std::sync::{Arc, Mutex};

use tutti_engine::{Engine, EngineSettings};
use tutti_kernels::TokenScore;
use tutti_models::{Limits, Model};
use tutti_proto::{
    Rank,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, NodeId, Plane, PlaneKind, Walk, WalkId, WalkKind},
};
use tutti_settings::ByteSize;

use self::model::{Hashing, choose, score};
pub use self::{
    constrained::{
        END, any_request, ascii, constrained, constrained_engine, probed_constrained_engine, regex, right,
        schema, text, vocabulary,
    },
    model::{InFlight, Probe, hidden},
    outcomes::{RequestResults, run, run_to_end, token_bits},
    stateful::{Stateful, with_logprobs},
};

pub const PREFILL: u32 = 0;
pub const DECODE: u32 = 1;
pub const MIXED: u32 = 2;
pub const VOCAB: u32 = 500;
pub const CONTEXT: usize = 256;
pub const PAGE_TOKENS: usize = 4;
pub const PAGE_BYTES: usize = 64;

pub fn settings() -> EngineSettings {
    EngineSettings {
        max_step_tokens: 16,
        max_running_requests: Some(8),
        kv_cache_memory: Some(ByteSize(129 * PAGE_BYTES as u64)),
        ..EngineSettings::default()
    }
}

pub fn model(in_flight: InFlight) -> (Box<dyn Model>, Arc<Mutex<Probe>>) {
    model_prefilled_by(WalkKind::Chunkable { batched_by: WalkId(MIXED) }, in_flight)
}

/// A model whose prefill walk is of the kind `prefill`.
pub fn model_prefilled_by(prefill: WalkKind, in_flight: InFlight) -> (Box<dyn Model>, Arc<Mutex<Probe>>) {
    model_ended_by(vec![], prefill, in_flight)
}

/// A model with these end tokens.
pub fn model_ended_by(
    eos_token_ids: Vec<u32>,
    prefill: WalkKind,
    in_flight: InFlight,
) -> (Box<dyn Model>, Arc<Mutex<Probe>>) {
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    let batched_by = WalkId(MIXED);
    let walks = vec![
        walk("prefill_text", prefill),
        walk("thinker_decode", WalkKind::Decode { batched_by }),
        walk("thinker_step", WalkKind::Mixed),
    ];
    let kind = PlaneKind::Paged {
        page_tokens: PAGE_TOKENS as u32,
        ratio: 1,
        bytes_per_entry: 16,
        element_type: pb::ElementType::F32,
    };
    let planes = vec![Plane { name: "kv".into(), kind }];
    let declaration = ModelDeclaration::new(vec!["thinker".into()], walks, planes);
    let limits = Limits {
        vocab_size: VOCAB as usize,
        max_context_tokens: CONTEXT,
        eos_token_ids,
        max_step_tokens: 64,
        steps_in_flight: in_flight.steps,
    };
    let probe = Arc::default();
    let declaration = declaration.expect("the declaration is valid");
    let model = Hashing::new(declaration, limits, in_flight, Arc::clone(&probe));
    (Box::new(model), probe)
}

/// An engine with one step in flight.
pub fn engine(settings: &EngineSettings) -> (Engine, Arc<Mutex<Probe>>) {
    engine_in_flight(settings, InFlight::ONE)
}

pub fn engine_in_flight(settings: &EngineSettings, in_flight: InFlight) -> (Engine, Arc<Mutex<Probe>>) {
    let (model, probe) = model(in_flight);
    (Engine::new(model, Rank(0), settings, 64).expect("sound settings"), probe)
}

pub fn engine_with_queue(
    settings: &EngineSettings,
    max_waiting_requests: usize,
) -> (Engine, Arc<Mutex<Probe>>) {
    let (model, probe) = model(InFlight::ONE);
    (Engine::new(model, Rank(0), settings, max_waiting_requests).expect("sound settings"), probe)
}

/// A request for `max_tokens` tokens. No other request has the same prompt.
pub fn launch(request: u64, prompt: usize, max_tokens: u32) -> pb::LaunchGraph {
    pb::LaunchGraph {
        key: Some(pb::GraphKey { request, incarnation: 0, graph: 0 }),
        walks: vec![PREFILL, DECODE],
        spec: Some(pb::RequestSpec {
            prompt: (0..prompt as u64)
                .map(|index| ((request * 131 + index * 17) % u64::from(VOCAB)) as u32)
                .collect(),
            sampling: Some(pb::SamplingParams {
                temperature: 1.0,
                top_p: 1.0,
                repetition_penalty: 1.0,
                seed: request + 1000,
                ..Default::default()
            }),
            stopping: Some(pb::Stopping { max_tokens, ..Default::default() }),
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            media: vec![],
            cache_salt: vec![],
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Correct results of a request, computed from its own tokens alone.
pub struct Expected {
    pub output: Vec<u32>,
    pub logprobs: Vec<pb::TokenLogprob>,
    pub prompt_logprobs: Vec<pb::TokenLogprob>,
}

pub fn expected(launch: &pb::LaunchGraph) -> Expected {
    let spec = launch.spec.clone().expect("the launch has a spec");
    let (seed, max_tokens) =
        (spec.sampling.map_or(0, |s| s.seed), spec.stopping.map_or(0, |s| s.max_tokens as usize));
    let wire = |score: TokenScore| pb::TokenLogprob {
        logprob: score.logprob,
        rank: score.rank,
        top: score.top.into_iter().map(|(token_id, logprob)| pb::TopLogprob { token_id, logprob }).collect(),
    };
    let mut tokens = spec.prompt.clone();
    let prompt_logprobs = (1..tokens.len())
        .map(|index| {
            wire(score(
                hidden(tokens[..index].iter().copied()),
                tokens[index],
                spec.prompt_logprobs.unwrap_or(0),
            ))
        })
        .collect();
    let mut logprobs = Vec::new();
    for _ in 0..max_tokens {
        let hidden = hidden(tokens.iter().copied());
        let token = choose(hidden, seed, tokens.len() as u64, &[]);
        logprobs.push(wire(score(hidden, token, spec.logprobs.unwrap_or(0))));
        tokens.push(token);
    }
    Expected { output: tokens.split_off(spec.prompt.len()), logprobs, prompt_logprobs }
}
