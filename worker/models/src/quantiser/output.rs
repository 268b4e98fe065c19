//! A safetensors file whose tensors are written one by one, in any order.

use std::{
    collections::HashMap,
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use crate::LoadError;

/// A tensor of the file.
pub(super) struct OutputTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

/// The file while it is written.
pub(super) struct OutputFile {
    path: PathBuf,
    file: File,
    /// For each tensor, its bytes in the file.
    ranges: HashMap<String, Range<u64>>,
    /// Bytes of all tensors.
    bytes: u64,
}

impl OutputFile {
    /// Creates a file of its final size and writes its header.
    pub fn create(path: &Path, mut tensors: Vec<OutputTensor>) -> Result<Self, LoadError> {
        // Large elements come first, so that all are aligned.
        tensors.sort_by(|a, b| b.dtype.bitsize().cmp(&a.dtype.bitsize()).then_with(|| a.name.cmp(&b.name)));
        let mut infos = Vec::with_capacity(tensors.len());
        let mut end = 0;
        for OutputTensor { name, dtype, shape } in tensors {
            let start = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            infos.push((name, TensorInfo { dtype, shape, data_offsets: (start, end) }));
        }
        let damaged = |problem: String| LoadError::Weights {
            path: path.into(),
            problem: format!("cannot be written: {problem}"),
        };
        // Transformers refuses files that do not name their format.
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let offsets: Vec<_> = infos.iter().map(|(name, info)| (name.clone(), info.data_offsets)).collect();
        let metadata = Metadata::new(Some(metadata), infos).map_err(|error| damaged(error.to_string()))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|error| damaged(error.to_string()))?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let data_start = 8 + header.len() as u64;
        let fault = |source| LoadError::Write { path: path.into(), source };
        let file = File::create_new(path).map_err(fault)?;
        file.write_all_at(&(header.len() as u64).to_le_bytes(), 0).map_err(fault)?;
        file.write_all_at(&header, 8).map_err(fault)?;
        file.set_len(data_start + end as u64).map_err(fault)?;
        let range = |(start, end): (usize, usize)| data_start + start as u64..data_start + end as u64;
        let ranges = offsets.into_iter().map(|(name, offsets)| (name, range(offsets))).collect();
        Ok(Self { path: path.into(), file, ranges, bytes: end as u64 })
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.ranges.keys().map(String::as_str)
    }

    /// Writes a tensor.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), LoadError> {
        let range = self.ranges.get(name).filter(|range| range.end - range.start == bytes.len() as u64);
        let Some(range) = range else {
            let problem = format!("is to be written with {} bytes, for which there is no room", bytes.len());
            return Err(LoadError::Tensor { path: self.path.clone(), name: name.into(), problem });
        };
        self.file
            .write_all_at(bytes, range.start)
            .map_err(|source| LoadError::Write { path: self.path.clone(), source })
    }

    /// Waits until the file is on the disk.
    pub fn finish(self) -> Result<(), LoadError> {
        self.file.sync_all().map_err(|source| LoadError::Write { path: self.path, source })
    }
}
