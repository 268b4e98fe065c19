//! Medians and distributions.

use serde::Serialize;

/// A distribution. All fields are zero if there is no sample.
#[derive(Debug, Default, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Summary {
    pub samples: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Summary {
    /// Summarises samples. Percentiles are by nearest rank, so each percentile is one of the samples.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let Some(max) = values.last().copied() else { return Self::default() };
        let rank = |p: f64| values[((p * values.len() as f64).ceil() as usize).clamp(1, values.len()) - 1];
        Self {
            samples: values.len(),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: rank(0.5),
            p90: rank(0.9),
            p99: rank(0.99),
            max,
        }
    }
}

/// Returns the median, or 0 if there is no value.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return 0.0 };
    (values[last / 2] + values[values.len() / 2]) / 2.0
}

#[cfg(test)]
mod tests;
