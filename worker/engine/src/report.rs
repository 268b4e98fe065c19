//! Converts the engine's results into wire messages.

use std::time::Duration;

use tutti_kernels::TokenScore;
use tutti_models::ExpertLoad;
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind, telemetry};
use tutti_scheduler::{
    ConstraintFailure, Ending, FailureCause, Finish, Load, Outcome, RowCommit, TransferError,
};

use crate::{
    batch::RowResult,
    encoder_cache::EncoderCounts,
    masks::{MaskCounts, PoolCounts},
};

/// Time after which a request may be sent again that ended for want of memory for its constraint.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Report of a committed row; `None` if the row has no result, such as a chunk that ends inside a prompt.
pub(crate) fn row(commit: &RowCommit, result: RowResult) -> Option<pb::RowReport> {
    if commit.sampled.is_none() && result.prompt_scores.is_empty() {
        return None;
    }
    let row = &commit.row;
    let logprob = result.sampled.and_then(|sampled| sampled.score).map(token_logprob);
    let sampled = |token: tutti_scheduler::OutputToken| pb::SampledToken {
        token_id: token.token,
        index: token.index,
        logprob,
    };
    let prompt_logprobs = (!result.prompt_scores.is_empty()).then(|| pb::PromptLogprobs {
        first: result.first_scored as u32,
        tokens: result.prompt_scores.into_iter().map(token_logprob).collect(),
    });
    Some(pb::RowReport {
        key: Some(row.key.into()),
        epoch: row.epoch.0,
        walk: row.walk.0,
        tokens: commit.sampled.map(sampled).into_iter().collect(),
        prompt_logprobs,
        cached_tokens: commit.sampled.filter(|sampled| sampled.index == 0).map(|_| commit.cached_tokens),
    })
}

fn token_logprob(score: TokenScore) -> pb::TokenLogprob {
    let top = score.top.into_iter().map(|(token_id, logprob)| pb::TopLogprob { token_id, logprob }).collect();
    pb::TokenLogprob { logprob: score.logprob, rank: score.rank, top }
}

/// Converts a graph's ending into the completion that this rank reports.
pub(crate) fn completion(ending: Ending, rank: Rank) -> pb::Completion {
    let outcome = match ending.outcome {
        Outcome::Finished { reason, generated } => {
            let (reason, stop_token_id) = match reason {
                Finish::EndOfSequence => (pb::FinishReason::EndOfSequence, None),
                Finish::StopToken(id) => (pb::FinishReason::StopToken, Some(id)),
                // Clients see an end of the text.
                Finish::Complete => (pb::FinishReason::EndOfSequence, None),
                Finish::Length => (pb::FinishReason::Length, None),
            };
            let reason = reason.into();
            let finished =
                pb::Finished { reason, stop_token_id, generated, cached_tokens: ending.cached_tokens };
            pb::completion::Outcome::Finished(finished)
        }
        Outcome::Cancelled => pb::completion::Outcome::Cancelled(pb::CancelledOutcome {}),
        Outcome::DeadlineExceeded => pb::completion::Outcome::DeadlineExceeded(pb::DeadlineOutcome {}),
        Outcome::DeadlineUnreachable { needed, left } => {
            let (needed, left) = (needed.as_millis(), left.as_millis());
            let message = format!("the prompt takes at least {needed} ms more, but {left} ms are left");
            let error = Error::new(ErrorKind::DeadlineExceeded, message);
            pb::completion::Outcome::Failed(error.into())
        }
        Outcome::HandedOver { generated } => {
            pb::completion::Outcome::HandedOver(pb::HandedOver { generated })
        }
        Outcome::TransferFailed(TransferError::Lost(why)) => {
            pb::completion::Outcome::HandoverFailed(Error::unavailable(why).into())
        }
        Outcome::ConstraintFailed(failure) => {
            pb::completion::Outcome::Failed(constraint_failed(failure).into())
        }
        Outcome::TransferFailed(TransferError::Refused(why)) | Outcome::Failed(why) => {
            pb::completion::Outcome::Failed(Error::internal(why).into())
        }
    };
    pb::Completion {
        key: Some(ending.key.into()),
        epoch: ending.passes.0,
        rank: rank.0,
        outcome: Some(outcome),
    }
}

/// The error of a request whose constraint cannot be followed.
fn constraint_failed(ConstraintFailure { cause, why }: ConstraintFailure) -> Error {
    match cause {
        FailureCause::Constraint => Error::invalid("constraint", why),
        FailureCause::Memory => Error::overloaded(why, RETRY_AFTER),
        FailureCause::Worker => {
            let why = format!("the constraint cannot be followed: {why}");
            Error::internal(why).with_field("constraint")
        }
    }
}

pub(crate) fn load(
    load: Load,
    oldest_waiting: Duration,
    masks: MaskCounts,
    encoders: EncoderCounts,
    trace_steps_lost: u64,
) -> pb::WorkerLoad {
    pb::WorkerLoad {
        running: load.running as u32,
        waiting: load.waiting as u32,
        kv_pages_used: load.pages_used as u32,
        kv_pages_total: load.pages_total as u32,
        steps: load.steps,
        oldest_waiting_ms: u32::try_from(oldest_waiting.as_millis()).unwrap_or(u32::MAX),
        trace_steps_lost,
        kv_pages_cached: load.pages_cached as u32,
        preemptions: load.tally.preemptions,
        prefill_tokens: load.tally.prefill_tokens,
        cached_tokens: load.tally.cached_tokens,
        transfers: None,
        slots_used: load.slots_used as u32,
        slots_total: load.slots_total as u32,
        snapshots: load.slots_cached as u32,
        void_rows: load.tally.void_rows,
        log_lines_lost: telemetry::log_lines_lost(),
        masks: Some(mask_counts(masks)),
        encoders: encoder_counts(encoders),
    }
}

fn encoder_counts(counts: EncoderCounts) -> Option<pb::EncoderCounts> {
    let EncoderCounts { hits, misses, bytes, padding_tokens } = counts;
    let reported = pb::EncoderCounts { hits, misses, bytes, padding_tokens };
    (counts != EncoderCounts::default()).then_some(reported)
}

fn mask_counts(MaskCounts { pool, awaited, late }: MaskCounts) -> pb::MaskCounts {
    let PoolCounts { compilations, compile_us, cache_hits, masks, mask_us, failures } = pool;
    let awaited = awaited as u32;
    pb::MaskCounts { compilations, compile_us, cache_hits, masks, mask_us, failures, late, awaited }
}

pub(crate) fn expert_load(load: ExpertLoad) -> pb::ExpertLoad {
    let ExpertLoad { layer, experts, tokens, most } = load;
    pb::ExpertLoad { layer: layer as u32, experts: experts as u32, tokens, most }
}
