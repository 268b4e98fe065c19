//! Totals of the metrics, from which rates are computed.

use std::collections::BTreeMap;

use serde::Serialize;
use tutti_runtime::ErrorKind;

use super::{Outcome, OutcomeLabel, ReasonLabel, RouterMetrics};

/// Totals since the process's start, and the number of generations that run now.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    pub generated_tokens: u64,
    pub prompt_tokens: u64,
    /// Generations by their ends. `failed` has those whose deadline passed, too.
    pub finished: u64,
    pub failed: u64,
    pub cancelled: u64,
    /// Generations refused, by reason. The result of [`Totals::since`] has only reasons with a count above zero.
    pub refused: BTreeMap<&'static str, u64>,
    /// Observations of latencies per bucket.
    pub first_token: Vec<u64>,
    pub inter_token: Vec<u64>,
    /// Generations that run now.
    pub in_flight: u64,
}

impl RouterMetrics {
    /// The current totals.
    pub fn totals(&self) -> Totals {
        let own = &self.own;
        let ended = |outcome: Outcome| {
            own.outcomes.get(&OutcomeLabel { outcome: outcome.name() }).map_or(0, |count| count.get())
        };
        let refused = |reason| own.refusals.get(&ReasonLabel { reason }).map_or(0, |count| count.get());
        Totals {
            generated_tokens: own.generated_tokens.get(),
            prompt_tokens: own.prompt_tokens.get(),
            finished: ended(Outcome::Finished),
            failed: ended(Outcome::Failed) + ended(Outcome::DeadlineExceeded),
            cancelled: ended(Outcome::Cancelled),
            refused: ErrorKind::labels().map(|reason| (reason, refused(reason))).collect(),
            first_token: own.first_token.counts(),
            inter_token: own.between_tokens.counts(),
            in_flight: u64::try_from(own.in_flight.get()).unwrap_or_default(),
        }
    }
}

impl Totals {
    /// The events since earlier totals.
    pub fn since(&self, before: &Self) -> Self {
        let counts = |now: &[u64], then: &[u64]| {
            now.iter().zip(then).map(|(now, then)| now.saturating_sub(*then)).collect()
        };
        let refused = self.refused.iter().map(|(reason, count)| {
            (*reason, count.saturating_sub(before.refused.get(reason).copied().unwrap_or_default()))
        });
        Self {
            generated_tokens: self.generated_tokens.saturating_sub(before.generated_tokens),
            prompt_tokens: self.prompt_tokens.saturating_sub(before.prompt_tokens),
            finished: self.finished.saturating_sub(before.finished),
            failed: self.failed.saturating_sub(before.failed),
            cancelled: self.cancelled.saturating_sub(before.cancelled),
            refused: refused.filter(|(_, count)| *count > 0).collect(),
            first_token: counts(&self.first_token, &before.first_token),
            inter_token: counts(&self.inter_token, &before.inter_token),
            in_flight: self.in_flight,
        }
    }
}
