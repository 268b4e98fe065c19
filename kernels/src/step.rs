//! The inputs of one step, which the host gives to the device before any operation runs.

/// A page of a paged plane, such as a pool of keys and values. Page 0 is the null page: rows ([`RowInputs`]) that only
/// pad a step write to it, and it is never read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// The null page, which rows that only pad a step write to.
    pub const NULL: Self = Self(0);
}

/// One request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowInputs<'a> {
    /// Index of the row's first token among the step's tokens.
    pub first_token: usize,
    /// Number of tokens that the row computes, at least 1.
    pub tokens: usize,
    /// Position of the row's first token in its request. The planes already hold the request's tokens at earlier
    /// positions.
    pub start: usize,
    /// The request's pages in order of position. They cover at least `start + tokens` tokens.
    pub block_table: &'a [PageId],
}

/// The inputs of one forward pass (a step): the rows of several requests, one after the other.
///
/// `token_ids` and `positions` are `[tokens]`. `rows` cover the tokens in order, without gaps. `logit_rows` are the
/// ascending indices of the tokens whose hidden states go to the LM head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInputs<'a> {
    /// Vocabulary id of each token.
    pub token_ids: &'a [u32],
    /// Rotary position of each token. For text it is the index in the request; media will use other positions.
    pub positions: &'a [f32],
    /// The rows, one per request of the step.
    pub rows: &'a [RowInputs<'a>],
    /// Indices of the tokens whose logits are needed. A row that samples no token and needs no prompt logprobs has
    /// none.
    pub logit_rows: &'a [usize],
}
