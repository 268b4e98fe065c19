//! Completions: the end of a graph at a rank, and its consequences for the request.

use tutti_proto::{GraphKey, WorkerId, cluster::v1 as pb};
use tutti_runtime::Error;

use super::{Dropped, Effects, Phase, Request, Stage};
use crate::mailbox::Ending;

impl Request {
    /// Handles one rank's completion of a graph.
    pub fn on_completion(&mut self, from: WorkerId, completion: pb::Completion) -> Effects {
        let drop = |why| Effects { dropped: Some(why), ..Effects::default() };
        let Some(key) = completion.key.map(GraphKey::from) else { return drop(Dropped::Unknown) };
        if let Some(index) = self.leaving.iter().position(|run| run.key == key) {
            let run = &mut self.leaving[index];
            if let Err(why) = run.accept_completion(from, &completion) {
                return drop(why);
            }
            if run.is_over() {
                self.leaving.swap_remove(index);
            }
            return Effects { released: vec![(from, key)], ..Effects::default() };
        }
        let Some(run) = self.run_mut(key) else { return drop(self.why_unmatched(key)) };
        if let Err(why) = run.accept_completion(from, &completion) {
            return drop(why);
        }
        let mut effects = self.on_outcome(key, completion.outcome);
        effects.released.push((from, key));
        effects
    }

    fn on_outcome(&mut self, key: GraphKey, outcome: Option<pb::completion::Outcome>) -> Effects {
        use pb::completion::Outcome;
        match outcome {
            Some(Outcome::HandedOver(_)) if self.encodes(key) => self.on_encoded(),
            Some(Outcome::Finished(_)) if self.encodes(key) => {
                self.break_off("an encoder's graph ended before anything was handed over")
            }
            Some(Outcome::Finished(finished)) => self.on_rank_finished(key, finished),
            Some(Outcome::HandedOver(handed_over)) => self.on_handed_over(key, handed_over),
            Some(Outcome::HandoverFailed(fault)) => self.on_handover_failed(&Error::from(fault)),
            Some(Outcome::Failed(fault)) => self.end_early(Ending::Failed(fault.into())),
            Some(Outcome::Refused(fault)) => self.end_early(Ending::Refused(fault.into())),
            Some(Outcome::Cancelled(_)) => self.break_off("a worker cancelled it unasked"),
            // The worker's timer may fire before the conductor's. The client gets the same error from both.
            Some(Outcome::DeadlineExceeded(_)) => match self.deadline {
                Some(deadline) => self.end_early(Ending::Failed(deadline.error())),
                None => self.break_off("a worker ended it at a deadline that it does not have"),
            },
            None => self.break_off("a completion came without an outcome"),
        }
    }

    fn on_rank_finished(&mut self, key: GraphKey, finished: pb::Finished) -> Effects {
        let Some(run) = self.run_mut(key) else { return Effects::default() };
        if let Some(first) = run.finished.replace(finished)
            && first != finished
        {
            return self.break_off(&format!("ranks disagree about its end: {first:?} and {finished:?}"));
        }
        if !run.is_over() {
            return Effects::default();
        }
        match &self.phase {
            Phase::Live { stage: Stage::Reserving { .. }, .. } => {
                self.break_off("its decode ended before anything was handed over")
            }
            // The decode has finished, but the prefill's `HandedOver` has not arrived yet. The request ends when
            // `HandedOver` arrives.
            Phase::Live { stage: Stage::Prefilling { decode, .. }, .. } if decode.key == key => {
                Effects::default()
            }
            _ => self.on_finished(finished),
        }
    }

    /// Ends the request, after all ranks of its last graph have reported `Finished`.
    fn on_finished(&mut self, finished: pb::Finished) -> Effects {
        if finished.generated as usize != self.generated.len() {
            return self.break_off(&format!(
                "its worker counts {} tokens where {} arrived",
                finished.generated,
                self.generated.len()
            ));
        }
        if finished.reason() == pb::FinishReason::Unspecified {
            return self.break_off("its worker graph ended without a reason");
        }
        self.end_early(Ending::Finished(self.as_first_computed(finished)))
    }

    pub(super) fn as_first_computed(&self, finished: pb::Finished) -> pb::Finished {
        pb::Finished { cached_tokens: self.cached_tokens.unwrap_or(finished.cached_tokens), ..finished }
    }

    /// Handles a prefill's `HandedOver`: the decode continues, or the request ends if the decode has finished already.
    fn on_handed_over(&mut self, key: GraphKey, handed_over: pb::HandedOver) -> Effects {
        let Phase::Live { stage, .. } = &mut self.phase else { return Effects::default() };
        let (prefill, early) = match stage {
            Stage::Prefilling { prefill, early, .. } if prefill.key == key => (prefill, early),
            _ => return self.break_off("a worker handed over what it was to run to its end"),
        };
        if !prefill.is_over() {
            return Effects::default();
        }
        let (counted, due, here) =
            (handed_over.generated as usize, prefill.tokens_before + 1, self.generated.len());
        if counted != due || here < due || !early.is_empty() {
            return self.break_off(&format!(
                "it was handed over after {counted} tokens where {due} were due and {here} arrived"
            ));
        }
        let Stage::Prefilling { decode, .. } = std::mem::replace(stage, Stage::Waiting) else {
            return Effects::default();
        };
        let begun = decode.holders();
        let ended = decode.finished.filter(|_| decode.is_over());
        *stage = Stage::Running { run: decode };
        self.spans.handed_over("planes");
        let effects = ended.map(|finished| self.on_finished(finished)).unwrap_or_default();
        Effects { handed_over: true, begun, ..effects }
    }
}
