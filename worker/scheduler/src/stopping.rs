//! When a request's output ends.

use std::sync::Arc;

/// The rules of one request. Counts are of its whole output, earlier incarnations included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopping {
    max_tokens: u32,
    min_tokens: u32,
    /// Ids that end the request: the first `eos` of them as ends of sequence, the rest as its own stop tokens.
    ends: Arc<[u32]>,
    eos: usize,
}

/// Why a request's output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence id of the model.
    EndOfSequence,
    /// One of the request's own stop tokens.
    StopToken(u32),
    /// `max_tokens`.
    Length,
}

impl Stopping {
    /// `max_tokens` 0 asks for no output at all. `eos_token_ids` are the model's, or empty to ignore them.
    pub fn new(max_tokens: u32, min_tokens: u32, eos_token_ids: &[u32], stop_token_ids: &[u32]) -> Self {
        let ends = eos_token_ids.iter().chain(stop_token_ids).copied().collect();
        Self { max_tokens, min_tokens, ends, eos: eos_token_ids.len() }
    }

    /// The most tokens the output may have.
    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Ids that must not be sampled as the token after `generated` ones: whatever ends a request, before `min_tokens`.
    pub(crate) fn forbidden(&self, generated: u32) -> Arc<[u32]> {
        if generated < self.min_tokens { Arc::clone(&self.ends) } else { Arc::default() }
    }

    /// Whether `token` ends the output that had `generated` tokens before it.
    pub(crate) fn judge(&self, token: u32, generated: u32) -> Option<Finish> {
        let place = self.ends.iter().position(|&end| end == token).filter(|_| generated >= self.min_tokens);
        match place {
            Some(place) if place < self.eos => Some(Finish::EndOfSequence),
            Some(_) => Some(Finish::StopToken(token)),
            None => (generated + 1 >= self.max_tokens).then_some(Finish::Length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_forbidden_up_to_min_tokens_and_ends_after() {
        let stopping = Stopping::new(8, 2, &[7], &[9]);
        assert_eq!(*stopping.forbidden(1), [7, 9]);
        assert_eq!(stopping.judge(7, 1), None);
        assert!(stopping.forbidden(2).is_empty());
        assert_eq!(stopping.judge(7, 2), Some(Finish::EndOfSequence));
        assert_eq!(stopping.judge(9, 2), Some(Finish::StopToken(9)));
        assert_eq!(stopping.judge(1, 6), None);
        assert_eq!(stopping.judge(1, 7), Some(Finish::Length));
    }

    #[test]
    fn a_stop_token_as_the_last_allowed_one_is_a_stop() {
        assert_eq!(Stopping::new(1, 0, &[7], &[]).judge(7, 0), Some(Finish::EndOfSequence));
    }

    #[test]
    fn an_id_that_is_both_counts_as_end_of_sequence() {
        assert_eq!(Stopping::new(8, 0, &[7], &[7]).judge(7, 0), Some(Finish::EndOfSequence));
    }
}
