//! From settings to an engine that is warm, or to a rank that is ready to follow one.

use std::time::{Duration, Instant};

use tutti_engine::{Engine, StepMemory};
use tutti_kernels::{
    Device, DeviceError,
    cpu::{Cores, CpuDevice, Isa},
};
use tutti_models::{LoadError, LoadOptions, LoadProgress, Model, load, load_sim};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::Error;

use crate::{
    config::{DeviceKind, WorkerSettings},
    engine_thread::NEWS,
    group::{Formation, Member},
    isa,
    join::OUTBOX,
    packed,
};

/// Tokens a KV page: small enough that little is lost at a sequence's end, large enough that block tables stay short.
const PAGE_TOKENS: usize = 16;
/// Of dummy weights: any one will do, as long as all workers have the same.
const DUMMY_SEED: u64 = 0;
/// Progress is told at most this often.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// What a worker has become.
pub enum Loaded {
    /// It takes requests.
    Engine(Box<Engine>),
    /// It takes the plans of its group's leader.
    Follower(Member),
}

/// Loads, and warms up what takes requests. `tell` is called with how far loading is, now and then and at its end.
pub fn load_worker(
    settings: &WorkerSettings,
    rank: Rank,
    group: Option<&Formation>,
    tell: impl FnMut(pb::LoadProgress),
) -> Result<Loaded, Error> {
    let began = Instant::now();
    let model = load_model(settings, rank, group, tell)?;
    let loaded = Instant::now();
    let (model, engine_settings) = match group {
        None => (model, settings.engine()),
        Some(group) => {
            let member = group.join(model, &settings.engine())?;
            if !group.leads() {
                tracing::info!(worker = %rank, model = member.model().describe(), "loaded, follows");
                return Ok(Loaded::Follower(member));
            }
            member.lead(settings.engine())
        }
    };
    let mut engine = Engine::new(model, rank, &engine_settings)?;
    let cold = Instant::now();
    engine.warm_up()?;
    let StepMemory { device, host } = step_memory(&engine, settings);
    tracing::info!(
        worker = %rank,
        model = engine.model().describe(),
        threads = settings.threads,
        kv_pages = engine.kv_pages_total(),
        step_device_bytes = device,
        step_host_bytes = host,
        load = ?loaded.duration_since(began),
        warm_up = ?cold.elapsed(),
        "loaded and warm"
    );
    Ok(Loaded::Engine(Box::new(engine)))
}

fn load_model(
    settings: &WorkerSettings,
    rank: Rank,
    group: Option<&Formation>,
    mut tell: impl FnMut(pb::LoadProgress),
) -> Result<Box<dyn Model>, Error> {
    let options = LoadOptions {
        dir: settings.model_dir.clone(),
        load_format: settings.load_format,
        quantize: settings.quantize,
        max_step_tokens: settings.max_step_tokens,
        page_tokens: PAGE_TOKENS,
        nodes: settings.nodes.clone(),
        seed: DUMMY_SEED,
    };
    let mut told: Option<Instant> = None;
    let mut progress = |LoadProgress { done, total }: LoadProgress| {
        if done >= total || told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
            told = Some(Instant::now());
            tell(pb::LoadProgress { bytes_done: done, bytes_total: total });
        }
    };
    Ok(match settings.device {
        DeviceKind::Cpu => {
            let isa = isa::resolve(settings.cpu_isa)?;
            let mut device = cpu_device(settings, rank, isa).map_err(LoadError::from)?;
            if let Some(group) = group {
                device = device.with_group(group.for_device()?);
            }
            let packed = settings.packed_weights.as_deref();
            let packed =
                packed.map(|dir| packed::open(dir, settings, isa, device.group_rank())).transpose()?;
            if let Some(packed) = &packed {
                device = device.with_packed_weights(packed.clone());
            }
            let model = load(&options, device, &mut progress)?;
            packed.as_ref().inspect(|packed| packed::finish(packed));
            model
        }
        DeviceKind::Sim => load_sim(
            &settings.model_dir,
            settings.max_step_tokens,
            PAGE_TOKENS,
            rank.0,
            &settings.sim,
            settings.nodes.as_deref(),
        )?,
    })
}

/// The workers of a conductor have the first ranks, so that those on its machine get cores in turn.
fn cpu_device(settings: &WorkerSettings, rank: Rank, isa: Isa) -> Result<CpuDevice, DeviceError> {
    if !settings.pin_threads {
        return CpuDevice::new(settings.threads, isa);
    }
    let cores = Cores::allowed()?.share(rank.0 as usize, settings.threads);
    tracing::info!(worker = %rank, cores = ?cores.numbers(), "has cores of its own");
    CpuDevice::on_cores(&cores, isa)
}

/// What the largest step takes of this process.
fn step_memory(engine: &Engine, settings: &WorkerSettings) -> StepMemory {
    let longest = engine.max_request_tokens() as usize;
    StepMemory::of(engine.model(), &settings.engine(), longest, NEWS + OUTBOX)
}

/// What the engine says of itself once it takes requests.
pub fn ready(engine: &Engine, settings: &WorkerSettings) -> pb::Ready {
    let step_bytes = step_memory(engine, settings).total();
    let kv_bytes = engine.kv_bytes();
    ready_with(engine.model(), engine.kv_pages_total(), engine.max_request_tokens(), kv_bytes, step_bytes)
}

/// What a rank says of itself once it takes plans: the same as its leader, but for its own share of bytes. Of those, it
/// keeps no logprobs, and what its first step will take beside tensors is not known yet.
pub fn ready_to_follow(member: &Member) -> pb::Ready {
    let (model, pages) = (member.model(), member.pages().saturating_sub(1));
    let max_request_tokens = (pages * PAGE_TOKENS).min(model.limits().max_context_tokens);
    let kv_bytes = member.pages() as u64 * model.page_bytes() as u64;
    ready_with(model, pages as u32, max_request_tokens as u32, kv_bytes, model.step_bytes())
}

/// Names and files are the conductor's to add.
fn ready_with(
    model: &dyn Model,
    kv_pages_total: u32,
    max_request_tokens: u32,
    kv_bytes: u64,
    step_bytes: u64,
) -> pb::Ready {
    let limits = model.limits();
    pb::Ready {
        model: Some(pb::ModelDescription {
            served_name: String::new(),
            vocab_size: limits.vocab_size as u32,
            max_context_tokens: limits.max_context_tokens as u32,
            eos_token_ids: limits.eos_token_ids.clone(),
            has_tokenizer: false,
            declaration: Some(model.declaration().into()),
            max_request_tokens,
        }),
        kv_pages_total,
        weight_bytes: model.weight_bytes(),
        kv_bytes,
        step_bytes,
        layout_hash: model.page_layout().id(),
    }
}
