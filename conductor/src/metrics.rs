//! The conductor's metrics. The name of each metric gets the prefix `tutti_`. A worker's label is its rank, which stays
//! the same when the worker's process is restarted.

mod experts;
mod prefixes;
mod reports;
mod requests;
mod steps;
mod totals;
mod transfers;
mod usage;
mod workers;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::metrics::{
    Metrics,
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge},
};

use self::{
    experts::ExpertMetrics, prefixes::PrefixMetrics, reports::ReportMetrics, requests::RequestMetrics,
    steps::StepMetrics, totals::Totals, transfers::TransferMetrics, usage::UsageMetrics,
    workers::WorkerMetrics,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabel {
    worker: u32,
}

impl From<Rank> for WorkerLabel {
    fn from(worker: Rank) -> Self {
        Self { worker: worker.0 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

type PerWorker = Family<WorkerLabel, Gauge>;

/// The conductor's metrics, registered all at once and shared by reference.
#[derive(Debug)]
pub struct ConductorMetrics {
    requests: RequestMetrics,
    workers: WorkerMetrics,
    reports: ReportMetrics,
    steps: StepMetrics,
    transfers: TransferMetrics,
    experts: ExpertMetrics,
    prefixes: PrefixMetrics,
    totals: Totals,
    usage: UsageMetrics,
}

impl ConductorMetrics {
    /// Creates the metrics and registers them in `metrics`.
    pub fn new(metrics: &Metrics) -> Self {
        metrics.register(|registry| Self {
            requests: RequestMetrics::begin(registry),
            workers: WorkerMetrics::begin(registry),
            reports: ReportMetrics::register(registry),
            steps: StepMetrics::register(registry),
            transfers: TransferMetrics::register(registry),
            experts: ExpertMetrics::register(registry),
            prefixes: PrefixMetrics::register(registry),
            totals: Totals::register(registry),
            usage: UsageMetrics::register(registry),
        })
    }

    /// Sets the metrics that show a worker's latest report.
    pub(crate) fn load(&self, worker: Rank, load: &pb::WorkerLoad) {
        self.reports.take(worker, load);
        self.totals.take(worker, load);
        if let Some(counts) = &load.transfers {
            self.transfers.take(worker, counts);
        }
    }

    /// Sets the gauges of expert balance for the layers that a worker reports.
    pub(crate) fn expert_loads(&self, worker: Rank, loads: &[pb::ExpertLoad]) {
        self.experts.take(worker, loads);
    }

    /// Removes the metrics of a worker that has left the cluster.
    pub(crate) fn gone(&self, worker: Rank) {
        self.reports.gone(worker);
        self.totals.gone(worker);
        self.transfers.gone(worker);
        self.experts.gone(worker);
        self.workers.gone(worker);
        self.usage.gone(worker);
    }
}
