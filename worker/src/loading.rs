//! From settings to an engine that is warm.

use std::time::{Duration, Instant};

use tutti_engine::{Engine, StepMemory};
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_models::{LoadError, LoadOptions, LoadProgress, load, load_sim};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::Error;

use crate::{
    config::{DeviceKind, WorkerSettings},
    engine_thread::NEWS,
    join::OUTBOX,
};

/// Tokens a KV page: small enough that little is lost at a sequence's end, large enough that block tables stay short.
const PAGE_TOKENS: usize = 16;
/// Of dummy weights: any one will do, as long as all workers have the same.
const DUMMY_SEED: u64 = 0;
/// Progress is told at most this often.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// Loads and warms up. `tell` is called with how far loading is, now and then and at its end.
pub fn load_engine(
    settings: &WorkerSettings,
    rank: Rank,
    mut tell: impl FnMut(pb::LoadProgress),
) -> Result<Engine, Error> {
    let options = LoadOptions {
        dir: settings.model_dir.clone(),
        load_format: settings.load_format,
        max_step_tokens: settings.max_step_tokens,
        page_tokens: PAGE_TOKENS,
        seed: DUMMY_SEED,
    };
    let mut told: Option<Instant> = None;
    let mut progress = |LoadProgress { done, total }: LoadProgress| {
        if done >= total || told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
            told = Some(Instant::now());
            tell(pb::LoadProgress { bytes_done: done, bytes_total: total });
        }
    };
    let model = match settings.device {
        DeviceKind::Cpu => {
            let device = CpuDevice::new(settings.threads, Isa::detect()).map_err(LoadError::from)?;
            load(&options, device, &mut progress)?
        }
        DeviceKind::Sim => {
            load_sim(&settings.model_dir, settings.max_step_tokens, PAGE_TOKENS, rank.0, &settings.sim)?
        }
    };
    let mut engine = Engine::new(model, rank, &settings.engine())?;
    engine.warm_up()?;
    let StepMemory { device, host } = step_memory(&engine, settings);
    tracing::info!(
        worker = %rank,
        model = engine.model().describe(),
        threads = settings.threads,
        kv_pages = engine.kv_pages_total(),
        step_device_bytes = device,
        step_host_bytes = host,
        "loaded and warm"
    );
    Ok(engine)
}

/// What the largest step takes of this process.
fn step_memory(engine: &Engine, settings: &WorkerSettings) -> StepMemory {
    let longest = engine.max_request_tokens() as usize;
    StepMemory::of(engine.model(), &settings.engine(), longest, NEWS + OUTBOX)
}

/// What the engine says of itself once it takes requests. Names and files are the conductor's to add.
pub fn ready(engine: &Engine, settings: &WorkerSettings) -> pb::Ready {
    let model = engine.model();
    let limits = model.limits();
    pb::Ready {
        model: Some(pb::ModelDescription {
            served_name: String::new(),
            vocab_size: limits.vocab_size as u32,
            max_context_tokens: limits.max_context_tokens as u32,
            eos_token_ids: limits.eos_token_ids.clone(),
            has_tokenizer: false,
            declaration: Some(model.declaration().into()),
            max_request_tokens: engine.max_request_tokens(),
        }),
        kv_pages_total: engine.kv_pages_total(),
        weight_bytes: model.weight_bytes(),
        kv_bytes: engine.kv_bytes(),
        step_bytes: step_memory(engine, settings).total(),
    }
}
