//! Models that keep state in slots, and engines that run them.

use std::{path::Path, thread, time::Duration};

use serde_json::json;
use tutti_engine::{Engine, EngineSettings};
use tutti_kernels::{
    collective::{GroupRank, SharedMemory},
    cpu::{CpuDevice, Isa},
};
use tutti_models::{
    LoadFormat, LoadOptions, Model, Quantize, SimOptions, load, load_sim,
    lockstep::{Leader, follow},
};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::Error;
use tutti_settings::{ByteSize, SimProfile, SimSettings};

use super::{CONTEXT, VOCAB, launch, run_to_end, settings};

/// Deadline of a collective, far above the time that a working group needs.
const WAIT: Duration = Duration::from_secs(120);

/// Maximum number of tokens per step of all models in this file.
const MAX_STEP_TOKENS: usize = 64;

/// A model with a slot plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stateful {
    /// The simulated model, with its running digest in a slot, and a digest in pages for every `entry_tokens` tokens.
    /// If the digests in pages and slot differ, all later tokens are wrong.
    Sim { steps_in_flight: usize, late_us: u32, entry_tokens: usize },
    /// The test model of recurrences and attention, on the CPU, divided among the ranks of a TP group.
    Hybrid { state_size: usize, ranks: usize },
    /// A small Qwen3.5 on the CPU. Its state is in three slot planes.
    Qwen35,
}

impl Stateful {
    pub const ALL: [Self; 9] = [
        Self::Sim { steps_in_flight: 1, late_us: 0, entry_tokens: 1 },
        Self::Sim { steps_in_flight: 1, late_us: 100, entry_tokens: 1 },
        Self::Sim { steps_in_flight: 2, late_us: 0, entry_tokens: 1 },
        Self::Sim { steps_in_flight: 2, late_us: 100, entry_tokens: 1 },
        Self::Sim { steps_in_flight: 1, late_us: 0, entry_tokens: 2 },
        Self::Sim { steps_in_flight: 2, late_us: 100, entry_tokens: 4 },
        Self::Hybrid { state_size: 240, ranks: 1 },
        Self::Hybrid { state_size: 240, ranks: 2 },
        Self::Qwen35,
    ];

    /// A model whose slots are so large that few snapshots fit, and new snapshots replace old ones.
    pub const FEW_SNAPSHOTS: Self = Self::Hybrid { state_size: 960, ranks: 1 };

    /// The simulated model without late completions, with one and with two steps in flight.
    pub const SIMS: [Self; 2] = [Self::ALL[0], Self::ALL[2]];

    pub fn page_tokens(self) -> usize {
        match self {
            Self::Sim { .. } => 4,
            // On a CPU, the tokens of a page must fill whole panels of the kernels.
            Self::Hybrid { .. } | Self::Qwen35 => 16,
        }
    }

    /// Names of the slot planes, as errors list them.
    pub fn planes(self) -> &'static str {
        match self {
            Self::Sim { .. } => "state",
            Self::Hybrid { .. } => "recurrence",
            Self::Qwen35 => "conv_keys, conv_values, delta",
        }
    }

    /// Settings of the simulated device, which other models ignore.
    fn sim_settings(self) -> SimSettings {
        let (steps_in_flight, late_us, entry_tokens) = match self {
            Self::Sim { steps_in_flight, late_us, entry_tokens } => (steps_in_flight, late_us, entry_tokens),
            Self::Hybrid { .. } | Self::Qwen35 => (1, 0, 1),
        };
        SimSettings {
            profile: SimProfile::Instant,
            state: true,
            steps_in_flight,
            late_us,
            entry_tokens,
            ..Default::default()
        }
    }

    /// An engine with about `pages` pages. A third of the pages' memory is added for snapshots.
    pub fn engine(self, settings: &EngineSettings, pages: usize) -> Engine {
        self.engine_with(settings, pages, |_| {})
    }

    /// An engine with about `pages` pages. `change` changes the settings of its simulated device.
    pub fn engine_with(
        self,
        settings: &EngineSettings,
        pages: usize,
        change: impl FnOnce(&mut SimSettings),
    ) -> Engine {
        let mut sim_settings = self.sim_settings();
        change(&mut sim_settings);
        engine_of(self.model(&sim_settings), settings, pages)
    }

    /// An engine with this number of bytes for pages and slots.
    pub fn engine_in(self, settings: &EngineSettings, memory: u64) -> Result<Engine, Error> {
        let settings = EngineSettings { kv_cache_memory: Some(ByteSize(memory)), ..settings.clone() };
        Engine::new(self.model(&self.sim_settings()), Rank(0), &settings, 64)
    }

    /// Returns the model. `sim_settings` apply only to the simulated model.
    pub fn model(self, sim_settings: &SimSettings) -> Box<dyn Model> {
        match self {
            Self::Sim { .. } => sim(sim_settings),
            Self::Hybrid { state_size, ranks } => hybrid(state_size, ranks),
            Self::Qwen35 => qwen3_5(),
        }
    }

    /// Requests with prompts of these lengths and outputs of `output` tokens, with logprobs.
    pub fn launches(self, prompts: &[usize], output: u32) -> Vec<pb::LaunchGraph> {
        let launch = |(&prompt, request)| with_logprobs(launch(request, prompt, output));
        prompts.iter().zip(1..).map(launch).collect()
    }

    /// Returns the results of requests that run alone, one after another and without a prefix cache. Asserts that the
    /// simulated model gives the same tokens without slots.
    pub fn alone(self, launches: &[pb::LaunchGraph]) -> super::outcomes::Outcomes {
        let settings =
            EngineSettings { no_prefix_cache: true, max_step_tokens: MAX_STEP_TOKENS, ..settings() };
        let one_by_one = |mut engine: Engine| {
            let mut all = super::outcomes::Outcomes::default();
            for launch in launches {
                let mut one = run_to_end(&mut engine, std::slice::from_ref(launch));
                all.results.append(&mut one.results);
            }
            all
        };
        let alone = one_by_one(self.engine(&settings, 65));
        if let Self::Sim { .. } = self {
            let dense =
                SimSettings { state: false, entry_tokens: 1, steps_in_flight: 1, ..self.sim_settings() };
            let dense = sim(&dense);
            assert!(!dense.declaration().has_slots());
            assert_eq!(one_by_one(engine_of(dense, &settings, 65)).results, alone.results);
        }
        let mut results: Vec<_> = alone.results.values().collect();
        results.sort_unstable();
        assert!(results.windows(2).all(|pair| pair[0] != pair[1]), "the results can be told apart");
        alone
    }
}

pub fn with_logprobs(mut launch: pb::LaunchGraph) -> pb::LaunchGraph {
    launch.spec.as_mut().expect("the launch has a spec").logprobs = Some(2);
    launch
}

fn engine_of(model: Box<dyn Model>, settings: &EngineSettings, pages: usize) -> Engine {
    let running = 1 + settings.running_limit().min(settings.max_step_tokens) as u64;
    let (page_bytes, slot_bytes) = (model.page_bytes() as u64, model.declaration().slot_bytes());
    let pages = pages as u64 * page_bytes;
    let snapshots = if model.declaration().has_slots() && !settings.no_prefix_cache { pages / 3 } else { 0 };
    let memory = pages + snapshots + running * slot_bytes;
    let settings = EngineSettings { kv_cache_memory: Some(ByteSize(memory)), ..settings.clone() };
    Engine::new(model, Rank(0), &settings, 64).expect("sound settings")
}

fn sim(settings: &SimSettings) -> Box<dyn Model> {
    let dir = tempfile::tempdir().expect("a directory");
    let config = json!({ "vocab_size": VOCAB, "max_position_embeddings": CONTEXT });
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("it is writable");
    let options = SimOptions {
        dir: dir.path(),
        max_step_tokens: MAX_STEP_TOKENS,
        page_tokens: 4,
        nodes: None,
        rank: 0,
        settings,
    };
    load_sim(&options).expect("the config is sound")
}

/// Returns the hybrid test model. The ranks other than the leader are threads, which end with the leader.
fn hybrid(state_size: usize, ranks: usize) -> Box<dyn Model> {
    let dir = tempfile::tempdir().expect("a directory");
    let config = json!({
        "architectures": ["TuttiHybridTestForCausalLM"], "vocab_size": VOCAB, "hidden_size": 48,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "state_size": state_size, "max_position_embeddings": CONTEXT, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("it is writable");
    if ranks == 1 {
        return dummy_on(dir.path(), cpu());
    }
    let meet = |what: &str, rank| {
        let group_rank = GroupRank { rank, world_size: ranks };
        let met = SharedMemory::meet(&dir.path().join(what), group_rank, WAIT, WAIT);
        Box::new(met.expect("the other ranks meet"))
    };
    let load = |rank| dummy_on(dir.path(), cpu().with_group(meet("data", rank)));
    thread::scope(|scope| {
        let (meet, load) = (&meet, &load);
        let others: Vec<_> =
            (1..ranks).map(|rank| scope.spawn(move || (load(rank), meet("plans", rank)))).collect();
        let leader = Leader::new(load(0), meet("plans", 0));
        for other in others {
            let (mut model, mut plans) = other.join().expect("the rank loads");
            thread::spawn(move || follow(&mut *model, &mut *plans, &mut (), |_| {}));
        }
        Box::new(leader)
    })
}

/// A Qwen3.5 whose last layer is a delta net.
fn qwen3_5() -> Box<dyn Model> {
    let dir = tempfile::tempdir().expect("a directory");
    let config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "max_position_embeddings": CONTEXT, "rope_theta": 1e6,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("it is writable");
    dummy_on(dir.path(), cpu())
}

fn cpu() -> CpuDevice {
    CpuDevice::new(1, Isa::detect()).expect("there is a CPU")
}

fn dummy_on(dir: &Path, device: CpuDevice) -> Box<dyn Model> {
    let options = LoadOptions {
        kv_cache_dtype: tutti_models::KvCacheDtype::Auto,
        dir: dir.into(),
        load_format: LoadFormat::Dummy,
        quantize: Quantize::None,
        max_step_tokens: MAX_STEP_TOKENS,
        page_tokens: 16,
        expert_parallel: false,
        nodes: None,
        seed: 5,
    };
    load(&options, device, &mut |_| {}).expect("the config is sound")
}
