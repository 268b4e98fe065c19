//! Linear recurrences, whose state is in the slots of requests.

use super::family::family;
use crate::{Device, DeviceError};

/// The operands of [`Recurrence::decayed_sum`].
pub struct DecayedSum<'a, T, V, P> {
    /// Input of the step's tokens, `[tokens, channels]`.
    pub x: &'a T,
    /// Decay of each channel, `[channels]`.
    pub decay: &'a V,
    /// Planes whose slots hold the state.
    pub planes: &'a mut P,
    /// Index of the slot plane. Each slot of the plane holds the f32 states of all layers, end to end.
    pub plane: usize,
    /// Index of the layer among the layers with state.
    pub layer: usize,
}

family! {
    /// Linear recurrences over the tokens of each request.
    pub trait Recurrence {
        /// Computes `state = decay * state + x[t]` and `out[t] = state` for each row's tokens in order. `state` is the
        /// state in the row's slot. Each channel is computed alone, and its operations have the same order in prefill
        /// and in decode. Rows with the null slot change no request's state.
        fn decayed_sum(
            &mut self,
            operands: DecayedSum<'_, Self::Tensor, Self::Vector, Self::Planes>,
            out: &mut Self::Tensor,
        ) => |recorder| recorder.by_token();
    }
}
