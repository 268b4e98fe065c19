//! The header of a GGUF file: metadata and the table of tensors. Everything in it is checked against the file's length,
//! and nothing is allocated for entries that the file does not hold.
//!
//! Format: the magic, a version, the numbers of tensors and of metadata, the metadata, the table, then the data, each
//! tensor at a multiple of the alignment (ggml's docs/gguf.md).

mod read;
mod types;

use std::{collections::HashMap, fs::File, io::BufReader, path::Path};

use self::read::Reader;
pub use self::types::TensorType;
use crate::{Error, ErrorKind};

/// First bytes of a file.
const MAGIC: &[u8; 4] = b"GGUF";
/// Alignment of tensors in a file that says none.
const ALIGNMENT: u64 = 32;
/// Maximum number of dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 4;

/// A value of the metadata. Integers of all widths are one variant, and so are floats.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An integer.
    Integer(i128),
    /// A float.
    Float(f64),
    /// True or false.
    Flag(bool),
    /// A text.
    Text(String),
    /// A list of texts.
    Texts(Vec<String>),
    /// A list of integers.
    Integers(Vec<i64>),
    /// A list of floats.
    Floats(Vec<f32>),
}

/// The tensor of what each frequency of rotation is divided by. It is read as a part of the config.
pub const ROTARY_DIVISORS: &str = "rope_freqs.weight";

/// A tensor of the table. It lies within the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Sizes, outermost dimension first, so in the reverse of the file's order.
    pub shape: Vec<usize>,
    /// Type of its elements.
    pub dtype: TensorType,
    /// Range of its bytes in the file.
    pub bytes: std::ops::Range<usize>,
}

/// The header of a file.
#[derive(Clone, Debug, Default)]
pub struct Header {
    /// The metadata by key.
    pub metadata: HashMap<String, Value>,
    /// The tensors by name.
    pub tensors: HashMap<String, TensorInfo>,
}

/// True if the matrices of a checkpoint are held in f32: some are quantised, and no narrower type holds their values
/// exactly, or they are of several types, which could not be fused. Vectors and routers of experts do not count.
pub fn widens<'a>(tensors: impl Iterator<Item = (&'a String, &'a TensorInfo)>) -> bool {
    let is_matrix =
        |(name, info): &(&String, &TensorInfo)| info.shape.len() > 1 && !name.contains("ffn_gate_inp");
    let mut types = tensors.filter(is_matrix).map(|(_, info)| info.dtype);
    let Some(first) = types.next() else { return false };
    first.block_elements() > 1 || types.any(|other| other != first)
}

/// True if a path names a GGUF file.
pub fn is_file(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gguf") && path.is_file()
}

impl Header {
    /// Reads the header of the file `path`.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let invalid = |problem: String| {
            Error::new(ErrorKind::InvalidArgument, format!("{}: {problem}", path.display()))
                .with_field("model")
        };
        let file = File::open(path).map_err(|error| invalid(format!("cannot be read: {error}")))?;
        let bytes = file.metadata().map_err(|error| invalid(format!("cannot be read: {error}")))?.len();
        Self::read(BufReader::new(file), bytes).map_err(invalid)
    }

    /// Reads the header of a file of `file_bytes` bytes.
    pub fn read(input: impl std::io::Read, file_bytes: u64) -> Result<Self, String> {
        let mut reader = Reader::new(input, file_bytes);
        if &reader.array::<4>()? != MAGIC {
            return Err("is no GGUF file: it begins with other bytes".into());
        }
        match reader.u32()? {
            2 | 3 => {}
            version => return Err(format!("is GGUF of version {version}; supported: 2, 3, little-endian")),
        }
        let (tensors, entries) = (reader.u64()?, reader.u64()?);
        let mut header = Self::default();
        for _ in 0..entries {
            let key = reader.text()?;
            let kind = reader.u32()?;
            let value = reader.value(kind).map_err(|problem| format!("metadata {key:?}: {problem}"))?;
            if header.metadata.insert(key.clone(), value).is_some() {
                return Err(format!("metadata {key:?} occurs twice"));
            }
        }
        let mut table = Vec::new();
        for _ in 0..tensors {
            let name = reader.text()?;
            let entry = Entry::read(&mut reader).map_err(|problem| format!("tensor {name:?} {problem}"))?;
            table.push((name, entry));
        }
        let alignment = match header.metadata.get("general.alignment") {
            None => ALIGNMENT,
            Some(&Value::Integer(alignment)) if (1..=1 << 20).contains(&alignment) => alignment as u64,
            Some(other) => return Err(format!("general.alignment: {other:?} is not supported")),
        };
        let start = reader.position().next_multiple_of(alignment);
        for (name, entry) in table {
            let fault = |problem: String| format!("tensor {name:?} {problem}");
            let info = entry.placed(start, alignment, file_bytes).map_err(fault)?;
            if header.tensors.insert(name.clone(), info).is_some() {
                return Err(fault("occurs twice".into()));
            }
        }
        header.refuse_overlaps()?;
        Ok(header)
    }

    /// Refuses tensors that share bytes.
    fn refuse_overlaps(&self) -> Result<(), String> {
        let mut all: Vec<_> = self.tensors.iter().filter(|(_, info)| !info.bytes.is_empty()).collect();
        all.sort_by_key(|(_, info)| info.bytes.start);
        match all.windows(2).find(|pair| pair[1].1.bytes.start < pair[0].1.bytes.end) {
            None => Ok(()),
            Some(pair) => Err(format!("tensor {:?} overlaps {:?}", pair[1].0, pair[0].0)),
        }
    }

    /// Returns the integer of a key; `None` if it is missing.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, String> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Integer(number)) if u64::try_from(number).is_ok() => Ok(Some(number as u64)),
            Some(other) => Err(format!("{key}: must be an integer from 0, not {other:?}")),
        }
    }

    /// Returns the number of a key; `None` if it is missing.
    pub fn number(&self, key: &str) -> Result<Option<f64>, String> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Float(number)) if number.is_finite() => Ok(Some(number)),
            Some(other) => Err(format!("{key}: must be a finite float, not {other:?}")),
        }
    }

    /// Returns the float or integer of a key as a float; `None` if it is missing.
    pub fn any_number(&self, key: &str) -> Result<Option<f64>, String> {
        match self.metadata.get(key) {
            Some(&Value::Integer(number)) => Ok(Some(number as f64)),
            _ => self.number(key),
        }
    }

    /// Returns the flag of a key; `None` if it is missing.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Flag(flag)) => Ok(Some(flag)),
            Some(other) => Err(format!("{key}: must be true or false, not {other:?}")),
        }
    }

    /// Returns the text of a key; `None` if it is missing.
    pub fn text(&self, key: &str) -> Result<Option<&str>, String> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(format!("{key}: must be a text")),
        }
    }

    /// Returns the list of texts of a key. Fails if it is missing.
    pub fn texts(&self, key: &str) -> Result<&[String], String> {
        match self.metadata.get(key) {
            None => Err(format!("{key}: is missing")),
            Some(Value::Texts(texts)) => Ok(texts),
            Some(_) => Err(format!("{key}: must be a list of texts")),
        }
    }
}

/// An entry of the table, before its place is checked.
struct Entry {
    shape: Vec<u64>,
    dtype: TensorType,
    offset: u64,
}

impl Entry {
    fn read<R: std::io::Read>(reader: &mut Reader<R>) -> Result<Self, String> {
        let dimensions = reader.u32()?;
        if dimensions > MAX_DIMENSIONS {
            return Err(format!("has {dimensions} dimensions, the limit is {MAX_DIMENSIONS}"));
        }
        let mut shape = (0..dimensions).map(|_| reader.u64()).collect::<Result<Vec<_>, _>>()?;
        let dtype = TensorType::of(reader.u32()?)?;
        let offset = reader.u64()?;
        // The file lists the innermost dimension first.
        shape.reverse();
        Ok(Self { shape, dtype, offset })
    }

    fn placed(self, start: u64, alignment: u64, file_bytes: u64) -> Result<TensorInfo, String> {
        let Self { shape, dtype, offset } = self;
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(dtype.block_elements()) {
            let block = dtype.block_elements();
            return Err(format!(
                "of shape {shape:?} has rows that are no multiple of a block of {block} elements"
            ));
        }
        let elements = shape.iter().try_fold(1u64, |product, &n| product.checked_mul(n));
        let bytes = elements.and_then(|n| (n / dtype.block_elements()).checked_mul(dtype.block_bytes()));
        let Some(bytes) = bytes else {
            return Err(format!("has a shape that is too large: {shape:?}"));
        };
        if !offset.is_multiple_of(alignment) {
            return Err(format!("begins at {offset}, which is no multiple of the alignment, {alignment}"));
        }
        let first = start.checked_add(offset);
        match first.and_then(|first| Some((first, first.checked_add(bytes)?))) {
            Some((first, end)) if end <= file_bytes => {
                let shape = shape.into_iter().map(|n| n as usize).collect();
                Ok(TensorInfo { shape, dtype, bytes: first as usize..end as usize })
            }
            _ => Err(format!(
                "of shape {shape:?} begins at {offset} of the data and takes {bytes} bytes, but the file has \
                 {file_bytes} bytes: it is truncated"
            )),
        }
    }
}

#[cfg(test)]
mod tests;
