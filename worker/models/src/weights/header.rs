//! The header of a safetensors file. An error of a tensor's entry names the tensor.
//!
//! Format: 8 bytes of little-endian header length, the header as a JSON object of name → (dtype, shape, data_offsets),
//! then the data. See the safetensors crate's README.

use std::{collections::HashMap, fmt};

use safetensors::tensor::TensorInfo;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use serde_json::Value;

/// The key of the file's metadata, which is not a tensor.
const METADATA: &str = "__metadata__";

/// Maximum bytes of a header. The entry of a tensor takes about 100 bytes.
const MAX_HEADER_BYTES: u64 = 32 << 20;

/// A parsed header. Every tensor lies within the file.
#[derive(Debug)]
pub(super) struct Header {
    /// Offset of the data in the file, in bytes.
    pub data_start: usize,
    /// The tensors by name.
    pub tensors: HashMap<String, TensorInfo>,
}

/// An error in a header. `tensor` is `None` if the error is not about a single tensor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HeaderError {
    pub tensor: Option<String>,
    pub problem: String,
}

impl HeaderError {
    fn file(problem: impl Into<String>) -> Self {
        Self { tensor: None, problem: problem.into() }
    }
}

impl Header {
    /// Reads the header of `file` and checks every tensor's extent against its shape and the file's length.
    pub fn parse(file: &[u8]) -> Result<Self, HeaderError> {
        let Some((length, rest)) = file.split_first_chunk::<8>() else {
            let found = file.len();
            return Err(HeaderError::file(format!(
                "not a safetensors file: {found} bytes, at least 8 expected"
            )));
        };
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER_BYTES {
            let problem = format!(
                "a header of {length} bytes is declared, the limit is {MAX_HEADER_BYTES}: not safetensors"
            );
            return Err(HeaderError::file(problem));
        }
        let Some(json) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
            let found = rest.len();
            let problem = format!(
                "truncated, or not safetensors: a header of {length} bytes is declared, {found} bytes follow"
            );
            return Err(HeaderError::file(problem));
        };
        let Entries(entries) = serde_json::from_slice(json)
            .map_err(|e| HeaderError::file(format!("the safetensors header is malformed: {e}")))?;

        let data_bytes = rest.len() - json.len();
        let mut tensors = HashMap::with_capacity(entries.len());
        let mut end_of_data = 0;
        // The header usually has the order of the data, so the error about a truncated file usually names the first
        // truncated tensor.
        for (name, entry) in entries {
            if name == METADATA {
                continue;
            }
            let fault = |problem: String| HeaderError { tensor: Some(name.clone()), problem };
            let info: TensorInfo = serde_json::from_value(entry)
                .map_err(|e| fault(format!("has a malformed header entry: {e}")))?;
            check_extent(&info, data_bytes).map_err(fault)?;
            end_of_data = end_of_data.max(info.data_offsets.1);
            tensors.insert(name, info);
        }
        if end_of_data < data_bytes {
            let extra = data_bytes - end_of_data;
            return Err(HeaderError::file(format!(
                "{extra} bytes follow the last tensor that the header names"
            )));
        }
        Ok(Self { data_start: 8 + json.len(), tensors })
    }
}

fn check_extent(info: &TensorInfo, data_bytes: usize) -> Result<(), String> {
    let (start, end) = info.data_offsets;
    let shape = &info.shape;
    let bits = shape.iter().try_fold(info.dtype.bitsize(), |bits, &n| bits.checked_mul(n));
    let Some(bytes) = bits.map(|bits| bits.div_ceil(8)) else {
        return Err(format!("has a shape that is too large: {shape:?}"));
    };
    if start.checked_add(bytes) != Some(end) {
        let dtype = info.dtype;
        return Err(format!(
            "of shape {shape:?} and type {dtype} takes {bytes} bytes, but its data_offsets are {start}..{end}"
        ));
    }
    if end > data_bytes {
        return Err(format!(
            "of shape {shape:?} ends at byte {end} of the data, but the file holds {data_bytes} bytes of data: it is truncated"
        ));
    }
    Ok(())
}

/// The entries of a JSON object in order. A name that occurs twice is an error. A map would silently keep only the last
/// entry.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format_args!("tensor {name:?} occurs twice")));
                    }
                    entries.push((name, value));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor)
    }
}

#[cfg(test)]
mod tests;
