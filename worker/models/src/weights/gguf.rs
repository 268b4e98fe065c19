//! The tensors of a GGUF checkpoint, in one file or several, mapped into memory. Names are those of the family's
//! checkpoints; [`names`] says which tensor of the files each one is, and [`blocks`] reads quantised elements.

pub(super) mod blocks;
mod names;

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use memmap2::{Mmap, UncheckedAdvice};
use tutti_kernels::{Device, HostMatrix, WeightType};
use tutti_runtime::{
    checkpoint::gguf_files,
    gguf::{self, Header, TensorInfo, TensorType},
};

use self::{
    blocks::{Blocks, RowOrder},
    names::Location,
};
use super::{Dims, ShardRange, TensorSpec, Window, convert, quantised::Layout, read_ahead::Extent, unused};
use crate::LoadError;

/// Frequencies of rotation, which older files have and which follow from the metadata.
const COMPUTED: &str = "attn_rot_embd";

/// The files of a GGUF checkpoint: one, or all of a split one.
pub(crate) struct GgufFile {
    files: Vec<MappedFile>,
    /// For each tensor, the index in `files` of the file that holds it.
    file_of: HashMap<String, usize>,
    /// Heads of q and of k, whose rows the file has in another order. `None` if it has the checkpoint's order.
    permuted: Option<[usize; 2]>,
    /// True if the device holds all matrices in f32: see [`gguf::widens`].
    is_widened: bool,
    unused: BTreeSet<String>,
}

struct MappedFile {
    path: PathBuf,
    map: Arc<Mmap>,
    header: Header,
}

/// A tensor that a spec names.
struct Found<'a> {
    file: &'a MappedFile,
    name: String,
    info: &'a TensorInfo,
    order: RowOrder,
}

impl GgufFile {
    /// Maps the files and reads their headers, but reads no tensor.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let mut files = gguf_files(path).into_iter().map(MappedFile::open).collect::<Result<Vec<_>, _>>()?;
        let mut file_of: HashMap<String, usize> = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.header.tensors.keys() {
                if let Some(other) = file_of.insert(name.clone(), index) {
                    let problem = format!("is also in {}", files[other].path.display());
                    return Err(LoadError::Tensor { path: file.path.clone(), name: name.clone(), problem });
                }
            }
        }
        let first = &files[0];
        let invalid = |problem| LoadError::Config { path: first.path.clone(), problem };
        let permuted = match first.header.text("general.architecture").map_err(invalid)? {
            Some("llama") => {
                let integer = |key: &str| first.header.integer(key).map_err(invalid);
                let heads = integer("llama.attention.head_count")?.unwrap_or(1) as usize;
                let kv_heads = integer("llama.attention.head_count_kv")?.unwrap_or(heads as u64) as usize;
                Some([heads.max(1), kv_heads.max(1)])
            }
            _ => None,
        };
        // The lists of tokens and merges take megabytes, which a load needs for weights.
        files.iter_mut().for_each(|file| file.header.metadata = HashMap::new());
        let is_widened = gguf::widens(files.iter().flat_map(|file| &file.header.tensors));
        let unused = file_of.keys().cloned().collect();
        Ok(Self { files, file_of, permuted, is_widened, unused })
    }

    /// Returns the tensor of a spec. Fails if it is missing or has another shape.
    fn find(&self, spec: &TensorSpec) -> Result<Found<'_>, LoadError> {
        let fault = |path: &Path, problem: String| LoadError::Tensor {
            path: path.into(),
            name: spec.name.clone(),
            problem,
        };
        let location = names::locate(&spec.name);
        let held =
            location.as_ref().and_then(|location| Some((location, *self.file_of.get(&location.name)?)));
        let Some((Location { name, expert, rows }, index)) = held else {
            let name = location
                .map_or("no tensor of GGUF".into(), |location| format!("{:?} of GGUF", location.name));
            let problem = format!("of shape {:?} is missing: it is {name}", spec.shape);
            return Err(fault(&self.files[0].path, problem));
        };
        let file = &self.files[index];
        let info = &file.header.tensors[name];
        let fits = match expert {
            None => info.shape == spec.shape,
            Some(expert) => {
                info.shape.len() == 3 && info.shape[0] > *expert && info.shape[1..] == spec.shape[..]
            }
        };
        if !fits || spec.dims.transposed || spec.dims.matrices > 1 {
            let (found, expected) = (&info.shape, &spec.shape);
            let problem = format!("({name:?}) has shape {found:?}, but the metadata ask for {expected:?}");
            return Err(fault(&file.path, problem));
        }
        let block = info.dtype.block_elements() as usize;
        if !spec.dims.columns.is_multiple_of(block) {
            let problem = format!(
                "({name:?}) is in blocks of {block}, which its rows of {} are not",
                spec.dims.columns
            );
            return Err(fault(&file.path, problem));
        }
        let heads = match (self.permuted, rows) {
            (Some([heads, _]), names::Rows::Queries) => Some(heads),
            (Some([_, kv_heads]), names::Rows::Keys) => Some(kv_heads),
            _ => None,
        };
        if let Some(heads) = heads
            && !spec.dims.rows.is_multiple_of(2 * heads)
        {
            let problem = format!("has {} rows, which {heads} heads do not divide", spec.dims.rows);
            return Err(fault(&file.path, problem));
        }
        let rows = spec.dims.rows;
        let order = RowOrder { first: expert.unwrap_or(0) * rows, rows, heads };
        Ok(Found { file, name: name.clone(), info, order })
    }

    /// Returns the type of a tensor on the device. Fails if the tensor is missing or has another shape.
    pub fn check(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        let Found { info, .. } = self.find(spec)?;
        let is_matrix = spec.dims.columns > 1;
        Ok(match info.dtype {
            _ if is_matrix && self.is_widened => WeightType::F32,
            TensorType::F16 => WeightType::F16,
            TensorType::Bf16 => WeightType::Bf16,
            _ => WeightType::F32,
        })
    }

    /// Refuses a part of a matrix whose borders divide a block.
    pub fn check_range(&self, spec: &TensorSpec, range: &ShardRange) -> Result<(), LoadError> {
        let Found { file, name, info, .. } = self.find(spec)?;
        let block = info.dtype.block_elements() as usize;
        let columns = &range.columns;
        match [columns.start, columns.end].iter().find(|border| !border.is_multiple_of(block)) {
            Some(border) if spec.dims.columns > 1 => {
                let problem =
                    format!("has blocks of {block} inputs, and a rank's part begins or ends at {border}");
                Err(LoadError::Tensor { path: file.path.clone(), name, problem })
            }
            _ => Ok(()),
        }
    }

    /// Returns a matrix that is quantised; `None` for other tensors.
    pub(super) fn blocks(&self, spec: &TensorSpec) -> Result<Option<Blocks<'_>>, LoadError> {
        let Found { file, info, order, .. } = self.find(spec)?;
        let (bytes, dtype) = (&file.map[info.bytes.clone()], info.dtype);
        let columns = spec.dims.columns;
        Ok((dtype.block_elements() > 1).then_some(Blocks { bytes, dtype, columns, order }))
    }

    /// Reads a window of a tensor as elements of type `held`, row by row.
    pub fn read<D: Device>(
        &self,
        device: &mut D,
        spec: &TensorSpec,
        window: &Window,
        held: WeightType,
    ) -> Result<Vec<u8>, LoadError> {
        if let Some(blocks) = self.blocks(spec)? {
            return Ok(convert::dequantise(device, &blocks as &dyn Layout, window, held)?);
        }
        let Found { file, info, order, .. } = self.find(spec)?;
        let Dims { columns, .. } = spec.dims;
        let dtype = match info.dtype {
            TensorType::F16 => WeightType::F16,
            TensorType::Bf16 => WeightType::Bf16,
            _ => WeightType::F32,
        };
        let bytes = &file.map[info.bytes.clone()];
        let size = dtype.bytes();
        let of_row = |row: usize| {
            let first = order.row(row) * columns;
            &bytes[(first + window.columns.start) * size..(first + window.columns.end) * size]
        };
        let gathered: Vec<u8> = window.rows.clone().flat_map(of_row).copied().collect();
        if dtype == held {
            return Ok(gathered);
        }
        let view = HostMatrix::new(&gathered, dtype, window.rows.len(), window.columns.len());
        Ok(convert::copy(device, view, held, false)?)
    }

    /// Returns the range of the file's bytes of a window's rows.
    pub fn extent(&self, spec: &TensorSpec, window: &Window) -> Result<Extent, LoadError> {
        let Found { file, info, order, .. } = self.find(spec)?;
        let row = spec.dims.columns as u64 / info.dtype.block_elements() * info.dtype.block_bytes();
        let at = |row_index: usize| info.bytes.start + (order.first + row_index) * row as usize;
        Ok(Extent { map: file.map.clone(), bytes: at(window.rows.start)..at(window.rows.end) })
    }

    /// Releases the mapped pages of a window that the device has copied. The pages stay in the page cache.
    pub fn release(&self, spec: &TensorSpec, window: &Window) -> Result<(), LoadError> {
        let Extent { map, bytes } = self.extent(spec, window)?;
        // SAFETY: the mapping of the file is shared, read-only and never written through. A later access to a dropped
        // page reads the same contents from the file again.
        let released =
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
        if let Err(error) = released {
            tracing::debug!(tensor = spec.name, %error, "could not release a tensor's mapped pages");
        }
        Ok(())
    }

    /// Notes that the model uses a tensor.
    pub fn mark_used(&mut self, name: &str) {
        if let Some(location) = names::locate(name) {
            self.unused.remove(&location.name);
        }
    }

    /// Refuses a layer's tensors that the model does not use: llama.cpp would add them to what the model computes.
    pub fn refuse_unused_layers(&self) -> Result<(), LoadError> {
        let name = self.unused.iter().find(|name| name.starts_with("blk.") && !name.contains(COMPUTED));
        match name {
            None => Ok(()),
            Some(name) => {
                let path = self.files[self.file_of[name]].path.clone();
                let problem = "is of a layer, and the model does not use it".to_owned();
                Err(LoadError::Tensor { path, name: name.clone(), problem })
            }
        }
    }

    /// Says which tensors the model does not use; `None` if it uses all.
    pub fn describe_unused(&self) -> Option<String> {
        let unused: Vec<&str> = self.unused.iter().map(String::as_str).collect();
        let used = self.file_of.keys().map(String::as_str).filter(|name| !self.unused.contains(*name));
        unused::describe(&unused, used)
    }
}

impl MappedFile {
    fn open(path: PathBuf) -> Result<Self, LoadError> {
        let read = |source| LoadError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read)?;
        // SAFETY: the file is mapped for reading only, under the same conditions as a safetensors file.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        match Header::read(&map[..], map.len() as u64) {
            Ok(header) => Ok(Self { path, map: Arc::new(map), header }),
            Err(problem) => Err(LoadError::Weights { path, problem }),
        }
    }
}

#[cfg(test)]
mod tests;
