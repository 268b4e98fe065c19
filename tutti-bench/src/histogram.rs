//! A histogram of durations with a bounded relative error and a fixed size, like HdrHistogram (Tene, 2012).
//!
//! Values are microseconds. Each value below `EXACT` has its own bucket. From `EXACT` on, the values between two powers
//! of two are divided into `EXACT / 2` buckets. The width of a bucket is thus at most 1/128 of its values, and the
//! middle of a bucket differs from its values by at most 1/256.

use std::time::Duration;

use serde::Serialize;

/// Each value below this number has its own bucket.
const EXACT: u64 = 256;
/// log2 of [`EXACT`].
const EXACT_BITS: u32 = 8;
/// Values from 2^36 microseconds on, which is 19 hours, count as the largest value below 2^36.
const MAX_BITS: u32 = 36;
const BUCKETS: usize = (EXACT + (MAX_BITS - EXACT_BITS) as u64 * EXACT / 2) as usize;

/// Counts of durations.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64]>,
    count: u64,
    sum: u128,
    min: u64,
    max: u64,
}

/// The figures of a histogram, in milliseconds. All are 0 without samples.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Summary {
    pub count: u64,
    pub mean: f64,
    pub min: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    /// Lower bound, exclusive upper bound and count of each bucket that is not empty.
    pub buckets: Vec<(f64, f64, u64)>,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS].into(), count: 0, sum: 0, min: u64::MAX, max: 0 }
    }
}

impl Histogram {
    /// Counts a duration.
    pub fn record(&mut self, duration: Duration) {
        let value = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX).min((1 << MAX_BITS) - 1);
        self.counts[index(value)] += 1;
        self.count += 1;
        self.sum += u128::from(value);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Number of durations counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns a quantile in microseconds, as the middle of its bucket. The quantile is the smallest value that at
    /// least a share `quantile` of the samples does not exceed. 0 without samples.
    pub fn quantile(&self, quantile: f64) -> u64 {
        let rank = ((quantile * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let (low, width) = bounds(index);
                return (low + width / 2).clamp(self.min, self.max);
            }
        }
        0
    }

    /// Returns all figures.
    pub fn summary(&self) -> Summary {
        let ms = |microseconds: u64| microseconds as f64 / 1e3;
        let quantile = |quantile| ms(self.quantile(quantile));
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        Summary {
            count: self.count,
            mean: if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 / 1e3 },
            min: if self.count == 0 { 0.0 } else { ms(self.min) },
            p50: quantile(0.5),
            p90: quantile(0.9),
            p95: quantile(0.95),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: ms(self.max),
            buckets: filled
                .map(|(index, count)| {
                    let (low, width) = bounds(index);
                    (ms(low), ms(low + width), *count)
                })
                .collect(),
        }
    }
}

/// The bucket of a value.
fn index(value: u64) -> usize {
    let shift = (u64::BITS - value.leading_zeros()).saturating_sub(EXACT_BITS);
    // For values from `EXACT` on, the top bit of the shifted value is always set.
    (u64::from(shift) * (EXACT / 2) + (value >> shift)) as usize
}

/// Returns the smallest value of a bucket, and the number of values that the bucket covers.
fn bounds(index: usize) -> (u64, u64) {
    let index = index as u64;
    let shift = (index / (EXACT / 2)).saturating_sub(1);
    ((index - shift * (EXACT / 2)) << shift, 1 << shift)
}

#[cfg(test)]
mod tests;
