//! The positions at which a request's slot is saved as a snapshot.
//!
//! A snapshot costs a slot and a cut in the prefill, so snapshots are few. They lie on a ladder of rungs: the powers of
//! two from [`FIRST`] on, in whole blocks. So any shared prefix that is at least as long as the first rung has a rung
//! in its second half. One more rung is the last whole block before the last token of the prefill, where an equal
//! prompt resumes.

/// The first rung of a long prefill, in blocks. A snapshot of a shorter prefix saves less time than the cut costs,
/// because each chunk reads all weights, however few tokens it has.
const FIRST: usize = 4;

/// The rungs of one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ladder {
    page_tokens: usize,
    /// The last rung: the number of whole blocks before the last token of the prefill.
    last: usize,
}

impl Ladder {
    /// The rungs of a request with a prefill of `prefill` tokens.
    pub fn new(prefill: usize, page_tokens: usize) -> Self {
        Self { page_tokens, last: prefill.saturating_sub(1) / page_tokens }
    }

    /// The first rung behind position `from`, as a position in tokens.
    pub fn next(self, from: usize) -> usize {
        let blocks = from / self.page_tokens;
        let next = (blocks + 1).next_power_of_two().max(FIRST);
        let next = if self.last > blocks { next.min(self.last) } else { next };
        next * self.page_tokens
    }

    /// The last rung that is at most `blocks`, in blocks. 0 if there is none.
    pub fn up_to(self, blocks: usize) -> usize {
        match blocks.checked_ilog2() {
            _ if blocks >= self.last => self.last,
            Some(power) if blocks >= FIRST => 1 << power,
            _ => 0,
        }
    }

    /// True if the position is a rung.
    pub fn has(self, position: usize) -> bool {
        let blocks = position / self.page_tokens;
        let whole = blocks > 0 && position.is_multiple_of(self.page_tokens);
        whole && (blocks == self.last || blocks >= FIRST && blocks.is_power_of_two())
    }
}

#[cfg(test)]
mod tests;
