//! Builds a worker from its settings: a warmed-up engine, or a TP rank that is ready to follow its leader.

use std::time::{Duration, Instant};

use tutti_engine::{Engine, EngineSettings, StepMemory, kv_budget, profile};
use tutti_kernels::{
    Device, DeviceError,
    collective::GroupRank,
    cpu::{Cores, CpuDevice, Isa},
    cuda::{CudaDevice, KernelCache},
};
use tutti_models::{LoadError, LoadOptions, LoadProgress, Model, SimOptions, load, load_sim};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{Error, memory};
use tutti_settings::{ByteSize, WorkerSettings};

use crate::{
    device::{self, Chosen},
    device_memory::{self, LastReading},
    engine_thread::PENDING_OUTPUTS,
    fit,
    group::{Formation, Member},
    isa,
    join::OUTBOX,
    packed, vocabulary,
};

/// Tokens per KV page: few enough to waste little at the end of a sequence, and enough to keep block tables short.
const PAGE_TOKENS: usize = 16;
/// Seed of dummy weights. Any value works, but all workers must use the same value.
const DUMMY_SEED: u64 = 0;
/// Minimum interval between progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A worker that has loaded its model.
pub enum Loaded {
    /// A worker that takes requests.
    Engine(Box<Engine>),
    /// A TP rank that runs the plans of its group's leader.
    Follower(Box<Member>),
}

/// Loads the model, and warms it up unless this rank follows a leader. Calls `on_progress` at intervals and when
/// loading ends. Readings of the device's memory go to `memory`.
pub fn load_worker(
    settings: &WorkerSettings,
    rank: Rank,
    group: Option<&Formation>,
    memory: &LastReading,
    on_progress: impl FnMut(pb::LoadProgress),
) -> Result<Loaded, Error> {
    let began = Instant::now();
    let mut model = load_model(settings, rank, group, memory, on_progress)?;
    let loaded = Instant::now();
    let share = settings.memory_share.map(|share| share.0);
    let (model, engine_settings) = match group {
        None => {
            profile(&mut *model, &settings.engine, GroupRank::ALONE)?;
            let kv_cache_memory = Some(ByteSize(kv_budget(&*model, &settings.engine, share)));
            (model, EngineSettings { kv_cache_memory, ..settings.engine.clone() })
        }
        Some(group) => {
            let member = group.join(model, &settings.engine, share)?;
            if !group.leads() {
                tracing::info!(
                    worker = rank.0,
                    model = member.model().describe(),
                    "loaded; follows its leader"
                );
                return Ok(Loaded::Follower(Box::new(member)));
            }
            member.lead()
        }
    };
    let mut engine = Engine::new(model, rank, &engine_settings, settings.max_waiting_requests)?;
    engine.set_vocabulary(vocabulary::reader(&settings.model_dir, engine.model().limits()));
    let cold = Instant::now();
    engine.warm_up()?;
    let StepMemory { device, host } = step_memory(&engine, settings);
    tracing::info!(
        worker = rank.0,
        model = engine.model().describe(),
        threads = threads(settings),
        kv_pages = engine.kv_pages_total(),
        step_device_bytes = device,
        step_host_bytes = host,
        load_ms = loaded.duration_since(began).as_millis() as u64,
        warm_up_ms = cold.elapsed().as_millis() as u64,
        "loaded and warm"
    );
    Ok(Loaded::Engine(Box::new(engine)))
}

/// Returns the options with which a worker with these settings loads its model.
pub(crate) fn load_options(settings: &WorkerSettings) -> LoadOptions {
    LoadOptions {
        dir: settings.model_dir.clone(),
        load_format: settings.weights.load_format,
        quantize: settings.weights.quantize,
        kv_cache_dtype: settings.engine.kv_cache_dtype,
        max_step_tokens: settings.engine.max_padded_tokens(),
        page_tokens: PAGE_TOKENS,
        expert_parallel: settings.tensor_parallel.ep,
        nodes: settings.nodes.clone(),
        seed: DUMMY_SEED,
    }
}

fn load_model(
    settings: &WorkerSettings,
    rank: Rank,
    group: Option<&Formation>,
    device_memory: &LastReading,
    mut on_progress: impl FnMut(pb::LoadProgress),
) -> Result<Box<dyn Model>, Error> {
    let options = load_options(settings);
    let mut reported: Option<Instant> = None;
    let mut progress = |LoadProgress { done, total }: LoadProgress| {
        if done >= total || reported.is_none_or(|reported| reported.elapsed() >= PROGRESS_INTERVAL) {
            reported = Some(Instant::now());
            on_progress(pb::LoadProgress { bytes_done: done, bytes_total: total });
        }
    };
    Ok(match device::choose(settings, rank)? {
        Chosen::Cuda { ordinal } => {
            let mut device = cuda_device(settings, rank, ordinal).map_err(LoadError::from)?;
            device_memory.follow(device_memory::of_gpu(device.memory_reader()));
            if let Some(group) = group {
                device = join_gpus(device, group)?;
            }
            fit::check_rank(settings, &options, &device)?;
            load(&options, device, &mut progress)?
        }
        Chosen::Cpu => {
            device_memory.follow(device_memory::of_host);
            let isa = isa::resolve(settings.device.cpu_isa)?;
            let mut device = cpu_device(settings, rank, isa).map_err(LoadError::from)?;
            // If the setting names a size, the memory is taken at once, so that no prefill waits while the system
            // clears it. The default size may be most of the machine's memory, and few workers use all of it, so it is
            // not taken at once. A size above the free memory is not taken at once either, because the system would
            // then kill processes.
            let wanted = settings.engine.kv_cache_memory;
            let fits = wanted.zip(memory::available()).is_some_and(|(wanted, free)| wanted.0 <= free);
            device = device.with_resident_planes(fits);
            device = device.with_screened_head(!settings.weights.no_screened_head);
            device = device.with_quantised_activations(!settings.weights.no_quantized_activations);
            if let Some(group) = group {
                device = device.with_group(group.for_cpus()?);
            }
            fit::check_rank(settings, &options, &device)?;
            let packed = settings.weights.packed_weights.as_deref();
            let packed =
                packed.map(|dir| packed::open(dir, settings, isa, device.group_rank())).transpose()?;
            if let Some(packed) = &packed {
                device = device.with_packed_weights(packed.clone());
            }
            let model = load(&options, device, &mut progress)?;
            packed.as_ref().inspect(|packed| packed::finish(packed));
            model
        }
        Chosen::Sim => {
            device_memory.follow(device_memory::of_host);
            load_sim(&SimOptions {
                dir: &settings.model_dir,
                max_step_tokens: settings.engine.max_padded_tokens(),
                page_tokens: PAGE_TOKENS,
                nodes: settings.nodes.as_deref(),
                rank: rank.0,
                settings: &settings.sim,
            })?
        }
    })
}

/// Makes the device a rank of its group.
fn join_gpus(device: CudaDevice, group: &Formation) -> Result<CudaDevice, Error> {
    let meeting = group.for_gpus()?;
    let GroupRank { rank, world_size: size } = meeting.group_rank;
    let device = device.join(&meeting).map_err(LoadError::from)?;
    tracing::info!(group_rank = rank, group_size = size, transport = "nccl", what = "data", "group formed");
    Ok(device)
}

/// Opens a GPU. The conductor ends a worker `hang_timeout` after its last step. If the GPU hangs for half of that time,
/// the log names the operation that hangs.
fn cuda_device(settings: &WorkerSettings, rank: Rank, ordinal: usize) -> Result<CudaDevice, DeviceError> {
    let limit = Duration::from_secs(settings.hang_timeout.into()) / 2;
    let cache = KernelCache::of_user().with_compiled(settings.device.compiled_kernels.clone());
    CudaDevice::open(ordinal, &cache)?
        .with_host_threads(threads(settings))
        .with_watchdog(limit, move |hangs| tracing::error!(worker = rank.0, "{hangs}"))
}

/// Creates the CPU device. If threads are pinned, the rank selects the cores. Workers that a conductor spawns have the
/// lowest ranks, so these workers take consecutive shares of the machine's cores.
fn cpu_device(settings: &WorkerSettings, rank: Rank, isa: Isa) -> Result<CpuDevice, DeviceError> {
    if !settings.device.pin_threads {
        return CpuDevice::new(threads(settings), isa);
    }
    let cores = Cores::allowed()?.share(rank.0 as usize, threads(settings));
    tracing::info!(worker = rank.0, cores = ?cores.numbers(), "threads are pinned to cores");
    CpuDevice::on_cores(&cores, isa)
}

/// Number of this worker's compute threads. The conductor fills in the default before it sends the settings, so 1 is
/// only a fallback.
fn threads(settings: &WorkerSettings) -> usize {
    settings.device.threads.unwrap_or(1) as usize
}

/// Memory that the largest step takes in this process.
fn step_memory(engine: &Engine, settings: &WorkerSettings) -> StepMemory {
    let longest = engine.max_request_tokens() as usize;
    StepMemory::of(engine.model(), &settings.engine, longest, PENDING_OUTPUTS + OUTBOX)
}

/// Ready message of an engine that takes requests.
pub fn ready(engine: &Engine, settings: &WorkerSettings) -> pb::Ready {
    let step_bytes = step_memory(engine, settings).total();
    let kv_bytes = engine.kv_bytes();
    let (pages, longest) = (engine.kv_pages_total(), engine.max_request_tokens());
    let running_limit = Some(engine.running_limit());
    pb::Ready { running_limit, ..ready_with(engine.model(), pages, longest, kv_bytes, step_bytes) }
}

/// Ready message of a rank that follows a leader. It differs from the leader's message only in the numbers of bytes,
/// which are this rank's own. `step_bytes` counts no host memory, because a follower keeps no logprobs. `step_bytes`
/// may also lack memory that the first step allocates, because the follower has not run a step yet.
pub fn ready_to_follow(member: &Member) -> pb::Ready {
    let (model, kv) = (member.model(), member.kv());
    let max_request_tokens = kv.tokens().min(model.limits().max_context_tokens);
    let pages = kv.pages.saturating_sub(1);
    ready_with(model, pages as u32, max_request_tokens as u32, kv.bytes(), model.step_bytes())
}

/// Builds a Ready message. The conductor fills in the served name and whether there is a tokenizer.
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
            aliases: Vec::new(),
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
        running_limit: None,
        device: model.device_name(),
    }
}
