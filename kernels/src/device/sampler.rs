//! Operations that end a step: from hidden states or logits to tokens and scores.

pub(crate) mod preconditions;

use super::dense::Norm;
use super::family::family;
use crate::{Device, DeviceError, Nomination, SampleRow, ScoreRow, TokenMask};

/// The operands of [`Sampler::argmax`].
pub struct Argmax<'a, T, M, V> {
    /// Hidden states, `[rows, inputs]`.
    pub x: &'a T,
    /// Norm that is applied to the rows of `x` first.
    pub norm: Option<Norm<'a, V>>,
    /// The LM head, `[vocabulary, inputs]`.
    pub weight: &'a M,
    /// Scratch memory, `[rows, vocabulary]`. Its contents are undefined afterwards.
    pub logits: &'a mut T,
    /// The tokens that each row may take; `None` allows all. An empty list has no masks, and a device that does not
    /// [mask the arg max](crate::DeviceLimits::masks_argmax) takes no other.
    pub allowed: &'a [Option<&'a TokenMask>],
}

/// Logits and candidates of rows to sample, which rank 0 of a TP group has gathered.
pub struct GatheredRows<'a, T> {
    /// Logits of the rows that were gathered whole, `[rows, vocabulary]`.
    pub logits: &'a T,
    /// Candidates of all ranks, as [`Sampler::nominate`] orders them, `[rows, 2 * candidates]`.
    pub candidates: &'a T,
    /// Peaks of the whole rows, `[rows, 2]`: the largest logit before and after adjustments.
    pub peaks: &'a T,
    /// Indices of the rows that have candidates, ascending. All other rows have logits.
    pub nominated: &'a [usize],
}

family! {
    /// Operations whose results are [collected](Device::collect). Each list of results is in the order in which the
    /// operations were enqueued.
    ///
    /// A request that cannot be answered, such as a row whose bias forbids every token, has an error of its own among
    /// the results. A row with logits that are NaN or infinite has the error [`DeviceError::NotFinite`].
    pub trait Sampler {
        /// Samples the likeliest allowed token of each row of `norm(x) · Wᵀ`. For a row that [takes the likeliest
        /// token](SampleRow::takes_the_likeliest), or [the likeliest allowed
        /// token](SampleRow::takes_the_likeliest_allowed), the result equals that of [`sample`](Self::sample), except
        /// that logits of forbidden tokens may stay uncomputed, so that it may be unknown that they are not finite.
        fn argmax(&mut self, argmax: Argmax<'_, Self::Tensor, Self::Matrix, Self::Vector>)
            => |recorder| recorder.product(argmax.x, argmax.weight);
        /// Finds the likeliest token of each row of `norm(x) · Wᵀ`, where the matrix is one shard of an LM head whose
        /// rows begin at token id `first`. Takes no masks. `out` is `[rows, 2]`: a logit and its token id. The logit is
        /// NaN if any logit of the row is NaN.
        fn partial_argmax(
            &mut self,
            argmax: Argmax<'_, Self::Tensor, Self::Matrix, Self::Vector>,
            first: usize,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.product(argmax.x, argmax.weight);
        /// Samples the likeliest of each row's candidates. Candidates are pairs of a logit and a token id, `[rows, 2 *
        /// candidates]`. If they are the results of [`partial_argmax`](Self::partial_argmax) for all shards, the token
        /// is the same as that of [`argmax`](Self::argmax) with the whole LM head.
        fn best_candidates(&mut self, candidates: &Self::Tensor) => |recorder| recorder.by_row(candidates);
        /// Applies each nomination's adjustments to row `rows[i].0` of `logits`, in place, and stores the largest logit
        /// before and after the adjustments in the same row of `peaks`, `[rows, 2]`. A peak is NaN if any logit of the
        /// row is NaN. `logits` is one shard of the vocabulary, whose token ids begin at `first`. The row indices
        /// ascend.
        fn adjust(
            &mut self,
            logits: &mut Self::Tensor,
            rows: &[(usize, &Nomination)],
            first: usize,
            peaks: &mut Self::Tensor,
        ) => |recorder| recorder.by_row(logits);
        /// Finds the best tokens of row `rows[i].0` of `logits` for each i, in the order of the nomination. `peaks`
        /// holds the peaks of the whole rows, over all shards. `out` is `[rows, 2 * candidates]`: pairs of a logit and
        /// a token id in order, followed by pairs without a token. The row indices ascend.
        fn nominate(
            &mut self,
            logits: &Self::Tensor,
            rows: &[(usize, &Nomination)],
            first: usize,
            peaks: &Self::Tensor,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.by_row(logits);
        /// Samples one token from row `rows[i].0` for each i: from the row's candidates if it is nominated, otherwise
        /// from its logits. In both cases the token is the same as that of [`sample`](Self::sample) on the whole row.
        fn sample_gathered(
            &mut self,
            gathered: GatheredRows<'_, Self::Tensor>,
            rows: &[(usize, SampleRow<'_>)],
        ) => |recorder| recorder.by_row(gathered.peaks);
        /// Samples one token from row `rows[i].0` of `logits` for each i.
        fn sample(&mut self, logits: &Self::Tensor, rows: &[(usize, SampleRow<'_>)])
            => |recorder| recorder.by_row(logits);
        /// Looks up the score of the known token `rows[i].1` in row `rows[i].0` of `logits` for each i.
        fn score(&mut self, logits: &Self::Tensor, rows: &[(usize, ScoreRow)])
            => |recorder| recorder.by_row(logits);
    }
}
