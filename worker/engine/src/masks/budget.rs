//! The limit of tokens inside a thinking block.

use tutti_proto::cluster::v1 as pb;

/// Counts the tokens inside a request's thinking block, and closes the block at its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThinkingBudget {
    begin: Option<u32>,
    end: u32,
    max_tokens: u32,
    phase: Phase,
}

/// The phase of the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// At the start, where the block may begin.
    Start,
    /// Inside the block, behind this many tokens of it.
    Inside(u32),
    /// Behind the block, or behind a start without one.
    Behind,
}

impl ThinkingBudget {
    /// The budget of a request without output; `None` if the block has no limit.
    pub fn of(thinking: &pb::Thinking) -> Option<Self> {
        let pb::Thinking { begin, end, max_tokens } = *thinking;
        let phase = if begin.is_some() { Phase::Start } else { Phase::Inside(0) };
        max_tokens.map(|max_tokens| Self { begin, end, max_tokens, phase })
    }

    /// Advances by a token of the output.
    pub fn commit(&mut self, token: u32) {
        self.phase = match self.phase {
            Phase::Start if Some(token) == self.begin => Phase::Inside(0),
            Phase::Inside(_) if token == self.end => Phase::Behind,
            Phase::Inside(tokens) => Phase::Inside(tokens.saturating_add(1)),
            Phase::Start | Phase::Behind => Phase::Behind,
        };
    }

    /// The token that ends the block, if the budget is spent and nothing else may follow.
    pub fn closes_with(&self) -> Option<u32> {
        matches!(self.phase, Phase::Inside(tokens) if tokens >= self.max_tokens).then_some(self.end)
    }
}

#[cfg(test)]
mod tests;
