//! The inputs of one step. The host passes them to the device before any operation runs.

pub(crate) mod check;

use tutti_planes::{PageId, SlotCopy, SlotId};

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
    /// The request's slot. No two rows of a step have the same slot, except for the null slot.
    pub slot: SlotId,
    /// True if the row's first token is the one that was sampled last for this slot, by a step that the host has not
    /// collected yet. The row's first entry in [`StepInputs::token_ids`] is then 0 and is not used.
    pub continues: bool,
    /// The request's pages in order of position. They cover at least `start + tokens` tokens.
    pub block_table: &'a [PageId],
}

/// The fixed shape of a step, for devices that are compiled for certain shapes.
///
/// The tokens of a step are followed by padding, up to [`tokens`](Self::tokens). Padding belongs to no row: it has no
/// position, reads no page, writes to no page and no slot, chooses no expert, and gives no logits. Its values are
/// undefined, and no row's result depends on them. A device may compute it or leave it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    /// Number of tokens, padding included.
    pub tokens: usize,
    /// Number of rows that [`Dense::keep_logit_rows`](crate::Dense::keep_logit_rows) keeps, padding included. Not more
    /// than `tokens`.
    pub logit_rows: usize,
}

/// The inputs of one forward pass (a step): the rows of several requests, one after the other.
///
/// `token_ids` and each axis of `positions` are `[tokens]`. `rows` cover the tokens in order, without gaps.
/// `logit_rows` are the ascending indices of the tokens whose hidden states go to the LM head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepInputs<'a> {
    /// Vocabulary id of each token.
    pub token_ids: &'a [u32],
    /// Rotary position of each token on three axes: time, height and width. For text, all three are the index in the
    /// request, so all three slices are the same.
    pub positions: [&'a [f32]; 3],
    /// The rows, one per request of the step.
    pub rows: &'a [RowInputs<'a>],
    /// Slot copies, which run in order before any row. A later copy sees the results of earlier ones.
    pub copies: &'a [SlotCopy],
    /// Indices of the tokens whose logits are needed. A row that samples no token and needs no prompt logprobs has
    /// none.
    pub logit_rows: &'a [usize],
    /// The shape to which the device pads the step; `None` for a step without padding. The lengths of `token_ids` and
    /// `logit_rows` are the numbers of valid tokens and valid logit rows.
    pub shape: Option<StepShape>,
}

impl StepInputs<'_> {
    /// Number of tokens that operations over tokens compute, padding included.
    pub fn padded_tokens(&self) -> usize {
        self.shape.map_or(self.token_ids.len(), |shape| shape.tokens)
    }

    /// Number of rows that operations over logit rows compute, padding included.
    pub fn padded_logit_rows(&self) -> usize {
        self.shape.map_or(self.logit_rows.len(), |shape| shape.logit_rows)
    }
}
