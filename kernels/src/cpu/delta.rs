//! The gated delta rule on the CPU: the convolutions and gates before it, the update of the state matrices
//! (*memories*), and the gated norm after it.
//!
//! Prefill and decode run the recurrent form, token by token. The chunked form needs about as much arithmetic, and its
//! results depend on where chunks begin.

mod decode;
pub(super) mod inputs;
pub(super) mod memory;
pub(super) mod norm;

use self::inputs::Inputs;
use self::memory::Memories;
use crate::DeviceError;
use crate::cpu::simd::isa::Path;
use crate::cpu::step::Row;
use crate::cpu::threads::pool::ThreadPool;

/// Computes the inputs of the delta rule, then applies the rule to the tokens of all rows. `memories` reads the inputs.
pub(super) fn delta_rule(
    path: Path,
    pool: &mut ThreadPool,
    rows: &[Row],
    inputs: &Inputs<'_>,
    memories: &Memories<'_>,
) -> Result<(), DeviceError> {
    if decode::fits(pool, rows, &memories.shape) {
        return decode::decode(path, pool, rows, inputs, memories);
    }
    inputs::inputs(path, pool, rows, inputs)?;
    memory::delta_rule(path, pool, rows, memories)
}
