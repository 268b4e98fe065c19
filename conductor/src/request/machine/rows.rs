//! Rows: a row is a request's share of one step. The tokens and prompt logprobs of rows are delivered once and in
//! order.

use tutti_proto::{GraphKey, WorkerId, cluster::v1 as pb};

use super::{Effects, Phase, Request, RowOutcome, Stage};
use crate::mailbox::Ending;

impl Request {
    /// Handles a row: delivers its new tokens in order, each once.
    pub fn on_row(&mut self, from: WorkerId, row: pb::RowReport) -> RowOutcome {
        let lost = RowOutcome { dropped: row.tokens.len(), ..RowOutcome::default() };
        let next = self.generated.len() as u32;
        let (Phase::Live { stage, .. }, Some(key)) = (&mut self.phase, row.key.map(GraphKey::from)) else {
            return lost;
        };
        if !stage.runs().any(|run| run.key == key && run.leader() == Some(from)) {
            return lost;
        }
        match stage {
            Stage::Prefilling { decode, early, .. } if decode.key == key && is_ahead(&row, next) => {
                early.push(row);
                RowOutcome::default()
            }
            Stage::Prefilling { .. } => {
                let mut outcome = self.take(key, row);
                self.take_early(&mut outcome);
                outcome
            }
            _ => self.take(key, row),
        }
    }

    /// Delivers each early row of the decode once all tokens before the row have arrived.
    fn take_early(&mut self, outcome: &mut RowOutcome) {
        loop {
            let next = self.generated.len() as u32;
            let Phase::Live { stage: Stage::Prefilling { decode, early, .. }, .. } = &mut self.phase else {
                return;
            };
            if early.first().is_none_or(|row| is_ahead(row, next)) {
                return;
            }
            let (key, row) = (decode.key, early.remove(0));
            let more = self.take(key, row);
            outcome.taken += more.taken;
            outcome.dropped += more.dropped;
            // No earlier effects are overwritten: a row has effects only if it ends the request, and then the loop
            // returns.
            outcome.effects = more.effects;
        }
    }

    fn take(&mut self, key: GraphKey, row: pb::RowReport) -> RowOutcome {
        let arrived = row.tokens.len();
        let next = self.generated.len();
        let seen = row.tokens.iter().take_while(|token| (token.index as usize) < next).count();
        let mut fresh = row.tokens;
        fresh.drain(..seen);
        if let Some(gap) =
            fresh.iter().zip(next..).find(|(token, expected)| token.index as usize != *expected)
        {
            let message = format!("token {} arrived where token {} was due", gap.0.index, gap.1);
            return RowOutcome { dropped: arrived, ..self.break_row(&message) };
        }
        let most = self.spec.stopping.max_tokens as usize;
        if next + fresh.len() > most {
            let message = format!("token {} arrived, but max_tokens is {most}", next + fresh.len() - 1);
            return RowOutcome { dropped: arrived, ..self.break_row(&message) };
        }
        let prompt_logprobs = match unscored(row.prompt_logprobs, self.next_scored) {
            Ok(piece) => piece,
            Err(message) => return RowOutcome { dropped: arrived, ..self.break_row(&message) },
        };
        if let Some(piece) = &prompt_logprobs {
            self.next_scored = piece.first + piece.tokens.len() as u32;
        }
        if let Some(run) = self.run_mut(key) {
            run.see_epoch(row.epoch);
        }
        // The usage reports the cache hits of the first prefill only, so a replay's count is not stored.
        if next == 0 && !fresh.is_empty() {
            self.cached_tokens = row.cached_tokens;
        }
        self.generated.extend(fresh.iter().map(|token| token.token_id));
        let taken = fresh.len();
        let mut effects = Effects::default();
        if let Phase::Live { output, .. } = &self.phase
            && (taken > 0 || prompt_logprobs.is_some())
            && let Err(error) = output.push(fresh, prompt_logprobs)
        {
            effects = self.end_early(Ending::Failed(error));
        }
        RowOutcome { taken, dropped: arrived - taken, effects }
    }

    fn break_row(&mut self, why: &str) -> RowOutcome {
        RowOutcome { effects: self.break_off(why), ..RowOutcome::default() }
    }
}

fn is_ahead(row: &pb::RowReport, next: u32) -> bool {
    row.tokens.first().is_some_and(|token| token.index > next)
}

/// Returns the logprobs of `piece` from prompt token `next` on. Earlier logprobs were already sent: a replay computes
/// all logprobs of the prompt again.
fn unscored(piece: Option<pb::PromptLogprobs>, next: u32) -> Result<Option<pb::PromptLogprobs>, String> {
    let Some(mut piece) = piece else { return Ok(None) };
    let Some(seen) = next.checked_sub(piece.first) else {
        return Err(format!(
            "the logprob of prompt token {} arrived where that of {next} was due",
            piece.first
        ));
    };
    piece.tokens.drain(..piece.tokens.len().min(seen as usize));
    piece.first = next;
    Ok(Some(piece).filter(|piece| !piece.tokens.is_empty()))
}
