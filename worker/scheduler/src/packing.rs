//! Which requests share the next step, and how many tokens each computes.
//!
//! Every decode gets its token first; what is left of the budget goes to prefills in order of arrival. A segment that
//! must not be cut goes in when it fits. When it does not it is left out, but not for ever: once [`ATOMIC_PATIENCE`]
//! steps have run without it, it comes before all other prefills, and if even then it does not fit beside the decodes,
//! it gets the step alone, over budget if need be.

use std::collections::BTreeMap;

use tutti_proto::walks::WalkId;

use crate::request::{Cut, Phase, Running, Ticket};

/// How many steps may leave an atomic segment out before it comes first; also how many steps the decodes have between
/// two that atomic segments took alone.
pub const ATOMIC_PATIENCE: u32 = 4;

/// What the next step is made of.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Shares within the budget, decodes first; empty if nothing can run.
    Within(Vec<Share>),
    /// One atomic segment that would not fit otherwise.
    Alone(Share),
}

/// One request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub ticket: Ticket,
    pub walk: WalkId,
    pub tokens: usize,
}

/// Fills a step of `budget` tokens with at most `chunk` tokens of each prefill that may be cut.
///
/// The running set is no larger than the budget (`SchedulerConfig::slots`), so every decode fits.
pub(crate) fn pack(running: &BTreeMap<Ticket, Running>, budget: usize, chunk: usize) -> Packing {
    let mut shares = Vec::with_capacity(running.len());
    let (mut overdue, mut in_time) = (Vec::new(), Vec::new());
    for (&ticket, request) in running.iter().filter(|(_, request)| !request.is_in_step()) {
        match request.phase() {
            Some(Phase::Decoding { walk }) => shares.push(Share { ticket, walk, tokens: 1 }),
            Some(Phase::Prefilling { walk, cut, left }) => {
                let share = Share { ticket, walk, tokens: left };
                if cut == Cut::Nowhere && request.passed_over >= ATOMIC_PATIENCE {
                    overdue.push((share, cut));
                } else {
                    in_time.push((share, cut));
                }
            }
            None => {}
        }
    }

    let decodes = shares.len();
    let aged = overdue.len();
    let mut left = budget.saturating_sub(decodes);
    for (place, (mut share, cut)) in overdue.into_iter().chain(in_time).enumerate() {
        if left == 0 {
            break;
        }
        if cut == Cut::Anywhere {
            share.tokens = share.tokens.min(chunk).min(left);
        } else if share.tokens > left {
            let first_prefill = shares.len() == decodes;
            if first_prefill && (place < aged || decodes == 0) {
                return Packing::Alone(share);
            }
            continue;
        }
        left -= share.tokens;
        shares.push(share);
    }
    Packing::Within(shares)
}
