//! Fixed shapes (`--chunk-shapes`): forwards are padded to a declared set of token counts, for devices that run
//! compiled or recorded graphs. Without the setting nothing is padded.
//!
//! The engine pads when it fills a forward's inputs; the scheduler does not know of padding. A plan has the same rows
//! with and without shapes, so shapes change no result and no order of requests. A scheduler that cut chunks down to a
//! shape would waste fewer rows, but would need another step for the rest of a prompt. Each step reads all weights,
//! whatever its number of rows. An operator who wants no padding sets `max_step_tokens` to a shape, because steps are
//! full while prompts wait. The engine checks at its start that the greatest shape is at least `max_step_tokens`, so
//! every forward has a shape.
//!
//! The step's inputs carry the shape as a [`StepShape`]. The lists in the inputs hold only valid tokens and logit rows.
//! In a TP group the leader's plan carries the shape, so that all ranks pad alike and their collectives have the same
//! number of rows. At the start each shape runs once ([`warm_up`](crate::warm_up)), on all ranks.
//!
//! Padding is not a row. It has no request, position, page or slot, so an operation has nothing to read or write for
//! it. Operations that work row by row (rotation and storing of keys and values, attention, convolutions and delta
//! rule, recurrences) skip padding and leave its outputs undefined. On the CPU these are NaN, so that a sum that
//! includes padding is noticed at once. Products, norms, gates and collectives compute padding like other rows of their
//! tensors, and no row depends on another. A mixture of experts gets the number of valid rows: padding chooses no
//! expert, is not counted, and causes no reads of expert weights. In the last layer, the rows that are kept for logits
//! are padded to a shape of the same set, so that all operations of a forward have a declared number of rows. The LM
//! head runs over tiles of wanted rows, which have no padding. A simulated device charges padding as prefill.
//!
//! Encoders run outside of forwards, and have shapes of their own (`--encoder-shapes`): tokens per call, padding
//! included, from which the number of patches follows. Padding has zeros for pixels or features and sees itself alone.
//! The convolutions over sound run chunk by chunk, and chunks are not padded: a longer chunk has other bits in its last
//! tokens, because biases leak from its padding.

use tutti_kernels::StepShape;
use tutti_proto::declaration::ModelDeclaration;
use tutti_runtime::Error;
use tutti_settings::ChunkShapes;

/// Returns the shape of a forward: the smallest of `shapes` with room for its tokens, and the smallest with room for
/// its logit rows. `None` if no shape has room. Such a forward has a row that cannot be cut, and the model refuses it
/// if the model's buffers are too small.
pub(crate) fn shape_of(shapes: Option<&ChunkShapes>, tokens: usize, logit_rows: usize) -> Option<StepShape> {
    let shapes = shapes?;
    Some(StepShape {
        tokens: shapes.fit(tokens)?,
        // Without logit rows the last layer ends early, so there are no logit rows to pad.
        logit_rows: if logit_rows == 0 { 0 } else { shapes.fit(logit_rows)? },
    })
}

/// Refuses shapes of encoders if even the greatest does not hold a full call, or if the encoders were loaded for fewer
/// tokens.
pub(crate) fn check_encoder_shapes(
    shapes: Option<&ChunkShapes>,
    model: &ModelDeclaration,
) -> Result<(), Error> {
    let Some(shapes) = shapes else { return Ok(()) };
    let greatest = shapes.greatest();
    for input in model.media() {
        let kind = input.kind.as_str_name().to_lowercase();
        let problem = match input.max_call_tokens.map(|most| most as usize) {
            None => format!("cannot be set: calls of the encoder of {kind} have no limit of tokens"),
            Some(most) if greatest < most => {
                format!(
                    "has no shape above {greatest}, but a call of the encoder of {kind} has up to {most} tokens"
                )
            }
            Some(most) if greatest > most => format!(
                "has a shape of {greatest}, but the encoder of {kind} was loaded for calls of {most} tokens"
            ),
            Some(_) => continue,
        };
        return Err(Error::invalid("encoder_shapes", problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
