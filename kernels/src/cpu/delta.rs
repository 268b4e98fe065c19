//! The gated delta rule on the CPU: the convolutions and gates before it, the memories, and the gated norm after it.
//!
//! Prefill and decode run the recurrent form, token by token. The chunked form needs about as much arithmetic, and its
//! results depend on where chunks begin.

pub(super) mod inputs;
pub(super) mod memory;
pub(super) mod norm;
