//! Metrics that show the numbers of each worker's last report.

use std::{array, collections::BTreeMap, fmt, sync::Arc, time::Instant};

use parking_lot::Mutex;
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::metrics::{
    Collector, Registry,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};

use super::{PerWorker, WorkerLabel, totals::QueueAge};

/// The metric of one integer in a worker's report.
struct Reported {
    name: &'static str,
    help: &'static str,
    value: fn(&pb::WorkerLoad) -> i64,
}

const REPORTED: [Reported; 27] = [
    Reported {
        name: "kv_pages_used",
        help: "KV pages that requests hold",
        value: |load| load.kv_pages_used.into(),
    },
    Reported {
        name: "kv_pages_total",
        help: "KV pages of the pool",
        value: |load| load.kv_pages_total.into(),
    },
    Reported {
        name: "kv_pages_cached",
        help: "KV pages that no request holds, kept for prompts with the same prefix",
        value: |load| load.kv_pages_cached.into(),
    },
    Reported {
        name: "slots_used",
        help: "Slots of state that requests hold",
        value: |load| load.slots_used.into(),
    },
    Reported {
        name: "slots_total",
        help: "Slots of state that requests and snapshots can hold",
        value: |load| load.slots_total.into(),
    },
    Reported {
        name: "snapshots",
        help: "Snapshots of the prefix cache that no request reads",
        value: |load| load.snapshots.into(),
    },
    Reported {
        name: "requests_running",
        help: "Requests in a worker's steps",
        value: |load| load.running.into(),
    },
    Reported {
        name: "requests_waiting",
        help: "Requests in a worker's queue",
        value: |load| load.waiting.into(),
    },
    Reported {
        name: "worker_steps",
        help: "Steps of a worker's current process",
        value: |load| load.steps as i64,
    },
    Reported {
        name: "trace_steps_lost",
        help: "Steps missing from the step trace of a worker's current process",
        value: |load| load.trace_steps_lost as i64,
    },
    Reported {
        name: "worker_log_lines_lost",
        help: "Log lines of a worker's current process that were lost because the reader of stderr was too slow",
        value: |load| load.log_lines_lost as i64,
    },
    Reported {
        name: "worker_void_rows",
        help: "Rows computed after the end of their requests, since the worker's process began",
        value: |load| load.void_rows as i64,
    },
    Reported {
        name: "worker_preemptions",
        help: "Preemptions since the worker's process began",
        value: |load| load.preemptions as i64,
    },
    Reported {
        name: "worker_prefill_tokens",
        help: "Prompt tokens of admitted requests, since the worker's process began",
        value: |load| load.prefill_tokens as i64,
    },
    Reported {
        name: "worker_cached_tokens",
        help: "Prompt tokens found in the prefix cache, since the worker's process began",
        value: |load| load.cached_tokens as i64,
    },
    Reported {
        name: "worker_constraints_compiled",
        help: "Constraints compiled for requests, since the worker's process began",
        value: |load| masks(load).compilations as i64,
    },
    Reported {
        name: "worker_constraint_compile_us",
        help: "Microseconds of compiling constraints, since the worker's process began",
        value: |load| masks(load).compile_us as i64,
    },
    Reported {
        name: "worker_constraint_cache_hits",
        help: "Constraints found compiled, since the worker's process began",
        value: |load| masks(load).cache_hits as i64,
    },
    Reported {
        name: "worker_masks",
        help: "Masks made behind tokens of constrained output, since the worker's process began",
        value: |load| masks(load).masks as i64,
    },
    Reported {
        name: "worker_mask_us",
        help: "Microseconds of making masks, since the worker's process began",
        value: |load| masks(load).mask_us as i64,
    },
    Reported {
        name: "worker_masks_late",
        help: "Rows planned again, because their mask was late or their step ran several forwards, since the \
               worker's process began",
        value: |load| masks(load).late as i64,
    },
    Reported {
        name: "worker_constraints_failed",
        help: "Requests that failed because their constraint could not be followed, since the worker's process began",
        value: |load| masks(load).failures as i64,
    },
    Reported {
        name: "worker_masks_awaited",
        help: "Requests that are left out of steps until a mask is ready",
        value: |load| masks(load).awaited.into(),
    },
    Reported {
        name: "worker_encoder_cache_hits",
        help: "Calls of media encoders whose embeddings were kept from an earlier call, since the worker's process began",
        value: |load| encoders(load).hits as i64,
    },
    Reported {
        name: "worker_encoder_cache_misses",
        help: "Calls of media encoders that ran, since the worker's process began",
        value: |load| encoders(load).misses as i64,
    },
    Reported {
        name: "worker_encoder_cache_bytes",
        help: "Bytes of embeddings of media that are kept for further requests",
        value: |load| encoders(load).bytes as i64,
    },
    Reported {
        name: "worker_encoder_padding_tokens",
        help: "Tokens of padding that media encoders computed to reach a fixed shape (--encoder-shapes), since the \
               worker's process began",
        value: |load| encoders(load).padding_tokens as i64,
    },
];

/// The counts of encoders; zeros from a worker that has encoded nothing.
fn encoders(load: &pb::WorkerLoad) -> pb::EncoderCounts {
    load.encoders.unwrap_or_default()
}

/// The counts of masks; zeros from a worker that makes none.
fn masks(load: &pb::WorkerLoad) -> pb::MaskCounts {
    load.masks.unwrap_or_default()
}

/// The age of each worker's queue, computed at each scrape, so that it grows while a worker reports nothing.
#[derive(Clone, Debug, Default)]
struct Ages(Arc<Mutex<BTreeMap<Rank, QueueAge>>>);

impl Collector for Ages {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let help = "Age in seconds of the oldest request that has not been part of a step";
        let mut family = encoder.encode_descriptor("queue_age_seconds", help, None, MetricType::Gauge)?;
        let now = Instant::now();
        for (rank, age) in self.0.lock().iter() {
            ConstGauge::new(age.seconds(now)).encode(family.encode_family(&WorkerLabel::from(*rank))?)?;
        }
        Ok(())
    }
}

/// One gauge per worker for each of [`REPORTED`], in the same order, and the ages of the queues.
#[derive(Debug)]
pub(super) struct ReportMetrics {
    gauges: [PerWorker; REPORTED.len()],
    ages: Ages,
}

impl ReportMetrics {
    pub fn register(registry: &mut Registry) -> Self {
        let gauges: [PerWorker; REPORTED.len()] = array::from_fn(|_| PerWorker::default());
        for (Reported { name, help, .. }, gauge) in REPORTED.iter().zip(&gauges) {
            registry.register(*name, *help, gauge.clone());
        }
        let ages = Ages::default();
        registry.register_collector(Box::new(ages.clone()));
        Self { gauges, ages }
    }

    pub fn take(&self, worker: Rank, load: &pb::WorkerLoad) {
        for (Reported { value, .. }, gauge) in REPORTED.iter().zip(&self.gauges) {
            gauge.get_or_create(&worker.into()).set(value(load));
        }
        self.ages.0.lock().insert(worker, QueueAge::of(load));
    }

    pub fn gone(&self, worker: Rank) {
        for gauge in &self.gauges {
            gauge.remove(&worker.into());
        }
        self.ages.0.lock().remove(&worker);
    }
}
