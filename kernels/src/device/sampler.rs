//! Operations that end a step: from hidden states or logits to tokens and scores.

use super::dense::Norm;
use super::family::family;
use crate::{Device, DeviceError, SampleRow, ScoreRow};

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
}

family! {
    /// Operations whose results are [collected](Device::collect), each list in the order of enqueueing.
    ///
    /// A request that cannot be answered, such as a row whose bias forbids every token, has an error of its own among the
    /// results. Logits that are NaN or infinite are [`DeviceError::Lost`], here or in `collect`.
    pub trait Sampler {
        /// Samples the likeliest token of each row of `norm(x) · Wᵀ`. For a row that [takes the likeliest
        /// token](SampleRow::takes_the_likeliest), the result equals that of [`sample`](Self::sample).
        fn argmax(&mut self, argmax: Argmax<'_, Self::Tensor, Self::Matrix, Self::Vector>)
            => |recorder| recorder.product(argmax.x, argmax.weight);
        /// Samples one token from row `rows[i].0` of `logits` for each i.
        fn sample(&mut self, logits: &Self::Tensor, rows: &[(usize, SampleRow<'_>)])
            => |recorder| recorder.by_row(logits);
        /// Looks up the score of the known token `rows[i].1` in row `rows[i].0` of `logits` for each i.
        fn score(&mut self, logits: &Self::Tensor, rows: &[(usize, ScoreRow)])
            => |recorder| recorder.by_row(logits);
    }
}
