//! A histogram of durations whose counts can be read, which those of the metrics library cannot.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use prometheus_client::{
    encoding::{EncodeMetric, MetricEncoder, NoLabelSet},
    metrics::MetricType,
};

/// A histogram of durations in seconds. Clones share the counts.
#[derive(Clone, Debug)]
pub struct LatencyHistogram(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    /// Upper bounds of the buckets in seconds, in ascending order.
    bounds: &'static [f64],
    /// Observations per bucket. The last bucket has those above all bounds.
    buckets: Vec<AtomicU64>,
    sum_ns: AtomicU64,
}

impl LatencyHistogram {
    /// Creates a histogram with these upper bounds of its buckets, in ascending order.
    pub fn new(bounds: &'static [f64]) -> Self {
        let buckets = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Counts { bounds, buckets, sum_ns: AtomicU64::new(0) }))
    }

    /// Counts a duration.
    pub fn observe(&self, duration: Duration) {
        let Counts { bounds, buckets, sum_ns } = &*self.0;
        let seconds = duration.as_secs_f64();
        let index = bounds.partition_point(|bound| *bound < seconds);
        buckets[index].fetch_add(1, Relaxed);
        sum_ns.fetch_add(duration.as_nanos() as u64, Relaxed);
    }

    /// Observations per bucket, from the process's start.
    pub fn counts(&self) -> Vec<u64> {
        self.0.buckets.iter().map(|count| count.load(Relaxed)).collect()
    }
}

impl EncodeMetric for LatencyHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let counts = self.counts();
        let bounds = self.0.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        let sum = Duration::from_nanos(self.0.sum_ns.load(Relaxed)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests;
