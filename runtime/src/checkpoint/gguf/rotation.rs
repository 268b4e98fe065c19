//! The rule that extends the context by other frequencies of rotation.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::PathBuf,
};

use serde_json::{Value, json};

use crate::gguf::{Header, ROTARY_DIVISORS, TensorInfo, TensorType};

/// Maximum size of the tensor of divisors in bytes.
const MAX_BYTES: usize = 1 << 16;

/// Reads what each frequency of rotation is divided by, if the model has such a tensor. llama.cpp's converter computes
/// it from Llama 3's rule. `header` has the tensors of all `files`.
pub(super) fn divisors(files: &[PathBuf], header: &Header) -> Result<Option<Vec<f32>>, String> {
    if !header.tensors.contains_key(ROTARY_DIVISORS) {
        return Ok(None);
    }
    let fault = |problem: String| format!("tensor {ROTARY_DIVISORS:?}: {problem}");
    // Offsets are those within the tensor's own part.
    for file in files {
        let part = Header::open(file).map_err(|error| error.to_string())?;
        let Some(tensor) = part.tensors.get(ROTARY_DIVISORS) else { continue };
        if tensor.dtype != TensorType::F32 || tensor.bytes.len() > MAX_BYTES {
            let TensorInfo { dtype, shape, .. } = tensor;
            return Err(fault(format!("is {dtype:?} of the shape {shape:?}, which is not supported")));
        }
        let mut bytes = vec![0; tensor.bytes.len()];
        let mut read = |file: &mut File| {
            file.seek(SeekFrom::Start(tensor.bytes.start as u64))?;
            file.read_exact(&mut bytes)
        };
        File::open(file).and_then(|mut file| read(&mut file)).map_err(|error| fault(error.to_string()))?;
        let numbers: Vec<f32> =
            bytes.as_chunks::<4>().0.iter().map(|&four| f32::from_le_bytes(four)).collect();
        return match numbers.iter().find(|number| !(number.is_finite() && **number > 0.0)) {
            None => Ok(Some(numbers)),
            Some(number) => Err(fault(format!("{number} divides no frequency"))),
        };
    }
    Ok(None)
}

/// Makes `rope_scaling`; `None` if there is none.
pub(super) fn scaling(
    header: &Header,
    divisors: Option<Vec<f32>>,
    key: &dyn Fn(&str) -> String,
) -> Result<Option<Value>, String> {
    let scaling = key("rope.scaling.type");
    Ok(match (header.text(&scaling)?, divisors) {
        (None | Some("none"), None) => None,
        (None | Some("none"), Some(divisors)) => {
            Some(json!({ "rope_type": "divisors", "divisors": divisors }))
        }
        (Some(kind), Some(_)) => {
            return Err(format!(
                "{scaling}: {kind:?} beside the tensor {ROTARY_DIVISORS:?} is not supported"
            ));
        }
        (Some("yarn"), None) => {
            let factor = key("rope.scaling.factor");
            let factor = header.number(&factor)?.ok_or_else(|| format!("{factor}: is missing"))?;
            let original = header.integer(&key("rope.scaling.original_context_length"))?;
            Some(
                json!({ "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original }),
            )
        }
        (Some(other), None) => {
            return Err(format!("{scaling}: {other:?} is not supported; supported: none, yarn"));
        }
    })
}

#[cfg(test)]
mod tests;
