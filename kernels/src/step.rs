//! What the host tells the device about one step, before anything runs.

/// A page of a paged plane. Page 0 is the null page: padded rows write there and nothing ever reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// Where padding goes.
    pub const NULL: Self = Self(0);
}

/// One request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowInputs<'a> {
    /// Index of the row's first token among the step's tokens.
    pub first_token: usize,
    /// How many tokens the row computes, at least 1.
    pub tokens: usize,
    /// Position of the row's first token in its request: that many tokens stand in the planes already.
    pub start: usize,
    /// The request's pages in order of position, covering `start + tokens` tokens or more.
    pub block_table: &'a [PageId],
}

/// The inputs of one forward: rows of different requests, laid end to end.
///
/// `token_ids`, `positions`: `[tokens]`. `rows` cover the tokens in order, without gaps. `logit_rows` are indices of
/// the tokens whose hidden states go on to the LM head, ascending.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInputs<'a> {
    /// Vocabulary ids.
    pub token_ids: &'a [u32],
    /// Rotary positions. Today the place in the request; not so for media.
    pub positions: &'a [f32],
    /// Which request owns which tokens.
    pub rows: &'a [RowInputs<'a>],
    /// The tokens whose logits are wanted: none for a row that is not terminal and asks for no prompt logprobs.
    pub logit_rows: &'a [usize],
}
