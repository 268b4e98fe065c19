//! The limit of tokens inside a thinking block.

use tutti_proto::cluster::v1 as pb;

/// Counts the tokens inside a request's thinking block, and closes the block at its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThinkingBudget {
    begin: Option<u32>,
    end: u32,
    max_tokens: u32,
    place: Place,
}

/// The place of the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
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
        let place = if begin.is_some() { Place::Start } else { Place::Inside(0) };
        max_tokens.map(|max_tokens| Self { begin, end, max_tokens, place })
    }

    /// Advances by a token of the output.
    pub fn commit(&mut self, token: u32) {
        self.place = match self.place {
            Place::Start if Some(token) == self.begin => Place::Inside(0),
            Place::Inside(_) if token == self.end => Place::Behind,
            Place::Inside(tokens) => Place::Inside(tokens.saturating_add(1)),
            Place::Start | Place::Behind => Place::Behind,
        };
    }

    /// The token that ends the block, if the budget is spent and nothing else may follow.
    pub fn closes_with(&self) -> Option<u32> {
        matches!(self.place, Place::Inside(tokens) if tokens >= self.max_tokens).then_some(self.end)
    }
}

#[cfg(test)]
mod tests;
