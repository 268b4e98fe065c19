//! Fixed shapes (`--chunk-shapes`): forwards are padded to a declared set of token counts, for devices that run
//! compiled or recorded graphs. Without the setting nothing is padded.
//!
//! The engine pads, when it fills a forward's inputs, and the scheduler does not know of it. A plan has the same rows
//! with and without shapes, so shapes change no result and no order of requests. A scheduler that cut chunks down to a
//! shape would waste fewer rows, but would need another step for the rest of a prompt, and a step reads all weights
//! whatever its number of rows. An operator who wants no waste sets `max_step_tokens` to a shape: while prompts wait,
//! steps are full. The greatest shape is not below `max_step_tokens`, which the engine checks at its start, so every
//! forward has a shape. It travels as a [`StepShape`] in the step's inputs, and the numbers of valid tokens and logit
//! rows are the lengths of the lists there. In a TP group the leader's plan carries it, so that all ranks pad alike and
//! their collectives have rows of one number. At the start each shape runs once ([`warm_up`](crate::warm_up)), which
//! the other ranks follow.
//!
//! Padding is no row: it has no request, position, page or slot, so there is nothing that an operation could read or
//! write for it. Operations that work through rows (rotation and storing of keys and values, attention, convolutions
//! and delta rule, recurrences) never meet padding, and leave its outputs undefined: NaN on the CPU, so that a sum
//! which takes padding in is seen at once. Products, norms, gates and collectives compute padding like other rows of
//! their tensors, none of which depends on another. A mixture of experts gets the number of valid rows: padding chooses
//! no expert, is not counted, and makes no expert be read. In the last layer, the rows that are kept for logits are
//! padded to a shape of the same set, so that all operations of a forward have a declared number of rows; the LM head
//! runs over tiles of wanted rows, which have no padding. Encoders run outside of forwards, on items of any length, and
//! are not padded. A simulated device charges padding as prefill.

use tutti_kernels::StepShape;
use tutti_settings::ChunkShapes;

/// The shape of a forward: the smallest of `shapes` with room for its tokens, and the same for its logit rows. `None`
/// for a forward that no shape has room for: a row that cannot be cut, which the model refuses if its buffers are too
/// small.
pub(crate) fn shape_of(shapes: Option<&ChunkShapes>, tokens: usize, logit_rows: usize) -> Option<StepShape> {
    let shapes = shapes?;
    Some(StepShape {
        tokens: shapes.fit(tokens)?,
        // Without logit rows the last layer ends early, so that there is nothing to pad.
        logit_rows: if logit_rows == 0 { 0 } else { shapes.fit(logit_rows)? },
    })
}

#[cfg(test)]
mod tests;
