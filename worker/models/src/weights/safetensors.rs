//! The safetensors files of a checkpoint, mapped into memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserialize;
use tutti_kernels::{HostMatrix, WeightType, collective::GroupRank};
use tutti_runtime::checkpoint::contents;

use super::{
    Dims, Role, ShardRange, TensorSpec, Window,
    header::Header,
    quantised::{self, Checked, ModuleTensors, RawTensor},
    read_ahead::Extent,
    unused,
};
use crate::{
    LoadError,
    config::{quantisation::Quantisation, read_json},
};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// End of the name of a matrix.
const WEIGHT: &str = ".weight";

/// The safetensors files of a directory: a single file, or the files that an index names.
pub(crate) struct SafetensorsDir {
    dir: PathBuf,
    files: Vec<WeightFile>,
    /// For each tensor name, the index in `files` of the file that holds the tensor.
    file_of: HashMap<String, usize>,
    unused: BTreeSet<String>,
    /// How `config.json` says that matrices are quantised; `None` if they are not.
    quantisation: Option<Quantisation>,
}

/// The stored form of a tensor.
pub(super) enum Stored<'a> {
    /// Elements of this type.
    Plain(WeightType),
    /// Integers of 64 bits, which the device holds as floats.
    Indices,
    /// A quantised matrix, whose elements the device holds in this type.
    Quantised(Checked<'a>, WeightType),
}

/// A file as it is, for readers of all its tensors.
pub(crate) struct SourceFile<'a> {
    pub path: &'a Path,
    file: &'a WeightFile,
}

impl<'a> SourceFile<'a> {
    /// The name of the file in its folder.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Returns the tensors with their bytes, in the order of the file.
    pub fn tensors(&self) -> impl Iterator<Item = (&'a str, &'a TensorInfo, &'a [u8])> {
        let file = self.file;
        let mut tensors: Vec<_> = file.header.tensors.iter().collect();
        tensors.sort_by_key(|(name, info)| (info.data_offsets, *name));
        tensors.into_iter().map(move |(name, info)| (name.as_str(), info, &file.map[file.extent(name)]))
    }
}

/// One mapped safetensors file.
struct WeightFile {
    path: PathBuf,
    map: Arc<Mmap>,
    header: Header,
}

impl SafetensorsDir {
    /// Maps the files and reads their headers, but reads no tensor.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
        let mut files = Vec::new();
        if single.exists() {
            files.push(WeightFile::open(single)?);
        } else if index.exists() {
            for path in indexed_paths(dir, &index)? {
                files.push(WeightFile::open(path)?);
            }
        } else {
            let known = contents::of_folder(dir).map_or(String::new(), |known| format!("; {known}"));
            let problem = format!("holds no weights: neither {SINGLE} nor {INDEX}{known}");
            return Err(LoadError::Weights { path: dir.into(), problem });
        }

        let mut file_of: HashMap<String, usize> = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for name in file.header.tensors.keys() {
                if let Some(other) = file_of.insert(name.clone(), index) {
                    let problem = format!("is also in {}", files[other].path.display());
                    return Err(LoadError::Tensor { path: file.path.clone(), name: name.clone(), problem });
                }
            }
        }
        let unused = file_of.keys().cloned().collect();
        Ok(Self { dir: dir.into(), files, file_of, unused, quantisation: None })
    }

    /// Sets how matrices are quantised.
    pub fn with_quantisation(self, quantisation: Option<Quantisation>) -> Self {
        Self { quantisation, ..self }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// True if the files hold a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.name_in_files(name).is_some()
    }

    /// Returns the shape of a tensor; `None` if the files do not hold it.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        let held = self.name_in_files(name)?;
        Some(&self.files[*self.file_of.get(held)?].header.tensors[held].shape)
    }

    /// Returns the name under which the files hold a tensor. In a base model without LM head, such as an embedding
    /// model, names lack the prefix `model.`. If transformers saves only the text model of a vision model, such as
    /// Qwen3.5, names keep the prefix `model.language_model.`.
    pub fn name_in_files(&self, name: &str) -> Option<&str> {
        let held = |name: &str| self.file_of.get_key_value(name).map(|(held, _)| held.as_str());
        held(name).or_else(|| {
            let inner = name.strip_prefix("model.")?;
            held(inner).or_else(|| held(&format!("model.language_model.{inner}")))
        })
    }

    /// Returns the file that holds a tensor, and the tensor's name in that file.
    fn find(&self, spec: &TensorSpec) -> Result<(&WeightFile, &str), LoadError> {
        let name = self.name_in_files(&spec.name).ok_or_else(|| {
            let (files, shape) = (self.files.len(), &spec.shape);
            let problem = format!("of shape {shape:?} is in none of its {files} safetensors files");
            LoadError::Tensor { path: self.dir.clone(), name: spec.name.clone(), problem }
        })?;
        Ok((&self.files[self.file_of[name]], name))
    }

    /// Returns the type of a tensor on the device. Fails if the tensor is missing, has another shape, or has an
    /// unsupported type.
    pub fn check(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        Ok(match self.stored(spec)? {
            Stored::Plain(dtype) | Stored::Quantised(_, dtype) => dtype,
            Stored::Indices => WeightType::F32,
        })
    }

    /// Refuses a part of a quantised matrix whose borders divide a group of elements that share a scale.
    pub fn check_range(&self, spec: &TensorSpec, range: &ShardRange) -> Result<(), LoadError> {
        let Stored::Quantised(Checked { layout, codes }, _) = self.stored(spec)? else { return Ok(()) };
        let divides = |border: usize, group: usize, end: usize| border == end || border.is_multiple_of(group);
        let Dims { rows, columns, .. } = spec.dims;
        let refuse = |what: &str, group: usize, border: usize| {
            let problem = format!(
                "has groups of {group} {what} that share a scale, and a rank's part begins or ends at {border}"
            );
            let file = &self.files[self.file_of[codes]];
            Err(LoadError::Tensor { path: file.path.clone(), name: codes.into(), problem })
        };
        for border in [range.columns.start, range.columns.end] {
            if !divides(border, layout.column_group(), columns) {
                return refuse("inputs", layout.column_group(), border);
            }
        }
        for border in range.rows.iter().flat_map(|rows| [rows.start, rows.end]) {
            if !divides(border, layout.row_group(), rows) {
                return refuse("outputs", layout.row_group(), border);
            }
        }
        Ok(())
    }

    /// Returns the stored form of a tensor. Fails as [`Self::check`] does.
    pub(super) fn stored(&self, spec: &TensorSpec) -> Result<Stored<'_>, LoadError> {
        if let Some(quantised) = self.quantised(spec)? {
            return Ok(quantised);
        }
        let (file, name) = self.find(spec)?;
        let info = &file.header.tensors[name];
        let fault =
            |problem: String| LoadError::Tensor { path: file.path.clone(), name: name.into(), problem };
        if info.shape != spec.shape {
            let (found, expected) = (&info.shape, &spec.shape);
            return Err(fault(format!("has shape {found:?}, but config.json asks for {expected:?}")));
        }
        match info.dtype {
            Dtype::I64 if spec.role == Role::Indices => Ok(Stored::Indices),
            other if spec.role == Role::Indices => Err(fault(format!("is of type {other}; supported: I64"))),
            Dtype::F32 => Ok(Stored::Plain(WeightType::F32)),
            Dtype::F16 => Ok(Stored::Plain(WeightType::F16)),
            Dtype::BF16 => Ok(Stored::Plain(WeightType::Bf16)),
            other => Err(fault(format!("is of type {other}; supported: F32, F16, BF16"))),
        }
    }

    /// Returns the stored form of a quantised matrix; `None` if the tensor is plain. The tensors decide which it is,
    /// and the config must agree.
    fn quantised(&self, spec: &TensorSpec) -> Result<Option<Stored<'_>>, LoadError> {
        let (Some(quantisation), Some(module)) = (&self.quantisation, spec.name.strip_suffix(WEIGHT)) else {
            return Ok(None);
        };
        let Dims { matrices: 1, rows, columns, transposed: false, .. } = spec.dims else { return Ok(None) };
        let marks = |kind: &&'static str| Some((*kind, self.name_in_files(&format!("{module}.{kind}"))?));
        let Some((kind, mark)) = quantised::MARKS.iter().find_map(marks) else { return Ok(None) };
        let fault = |problem: String| {
            let path = self.files[self.file_of[mark]].path.clone();
            LoadError::Tensor { path, name: mark.into(), problem }
        };
        // Names in the config are those of the files.
        let in_files = mark.find(module.strip_prefix("model.").unwrap_or(module)).map_or(0, |at| at);
        let in_files = &mark[..in_files + module.strip_prefix("model.").unwrap_or(module).len()];
        let scheme = quantisation.scheme_of(in_files).ok_or_else(|| {
            fault(format!("is of a quantised matrix, but quantization_config excludes {module}"))
        })?;
        let find = Box::new(|name: &str| self.raw(name));
        let parts = ModuleTensors { module: in_files, dir: &self.dir, rows, columns, find };
        Ok(Some(Stored::Quantised(quantised::check(scheme, kind, &parts)?, quantisation.dtype)))
    }

    /// Returns a tensor in its stored type.
    pub(super) fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        let name = self.name_in_files(name)?;
        let file = &self.files[self.file_of[name]];
        let info = &file.header.tensors[name];
        Some(RawTensor {
            name,
            path: &file.path,
            dtype: info.dtype,
            shape: &info.shape,
            bytes: &file.map[file.extent(name)],
        })
    }

    /// Returns the error that a tensor cannot be fused with another because their types differ.
    pub fn differs(&self, spec: &TensorSpec, with: &TensorSpec) -> Result<LoadError, LoadError> {
        let (file, name) = self.find(spec)?;
        let (other, other_name) = self.find(with)?;
        let dtypes = [file.header.tensors[name].dtype, other.header.tensors[other_name].dtype];
        let problem = format!("is of type {}, but {other_name:?} is of type {}", dtypes[0], dtypes[1]);
        Ok(LoadError::Tensor { path: file.path.clone(), name: name.into(), problem })
    }

    /// Returns a window of a tensor in the mapped file, in the stored layout. In a transposed matrix, the window's
    /// columns are outputs.
    pub fn window(&self, spec: &TensorSpec, window: &Window) -> Result<HostMatrix<'_>, LoadError> {
        let dtype = self.check(spec)?;
        let (file, name) = self.find(spec)?;
        Ok(window.view(&file.map[file.extent(name)], dtype))
    }

    /// Reads a table of indices as floats. Refuses an index that is not below `limit`, and one that occurs twice in a
    /// row.
    pub fn indices(&self, spec: &TensorSpec, limit: usize) -> Result<Vec<f32>, LoadError> {
        let Dims { rows, columns, .. } = spec.dims;
        self.stored(spec)?;
        let (file, name) = self.find(spec)?;
        let fault =
            |problem: String| LoadError::Tensor { path: file.path.clone(), name: name.into(), problem };
        let mut values = Vec::with_capacity(rows * columns);
        let words = file.map[file.extent(name)].as_chunks::<8>().0;
        for (index, row) in words.chunks_exact(columns.max(1)).enumerate() {
            let first = values.len();
            for word in row {
                let number = i64::from_le_bytes(*word);
                if !(0..limit as i64).contains(&number) {
                    return Err(fault(format!("has the index {number} in row {index}, of {limit}")));
                }
                if values[first..].contains(&(number as f32)) {
                    return Err(fault(format!("has the index {number} twice in row {index}")));
                }
                values.push(number as f32);
            }
        }
        Ok(values)
    }

    /// Returns the range of the file's bytes from a window's first element to its last. For a quantised matrix, these
    /// are the bytes of its codes.
    pub fn extent(&self, spec: &TensorSpec, window: &Window) -> Result<Extent, LoadError> {
        let size = match self.stored(spec)? {
            Stored::Plain(dtype) => dtype.bytes(),
            Stored::Indices => size_of::<i64>(),
            Stored::Quantised(Checked { layout, codes }, _) => {
                let file = &self.files[self.file_of[codes]];
                let (start, bytes) = (file.extent(codes).start, layout.extent(window.rows.clone()));
                return Ok(Extent { map: file.map.clone(), bytes: start + bytes.start..start + bytes.end });
            }
        };
        let (file, name) = self.find(spec)?;
        let (start, elements) = (file.extent(name).start, window.extent());
        Ok(Extent {
            map: file.map.clone(),
            bytes: start + elements.start * size..start + elements.end * size,
        })
    }

    /// Returns the files, sorted by name.
    pub fn source_files(&self) -> impl Iterator<Item = SourceFile<'_>> {
        self.files.iter().map(|file| SourceFile { path: &file.path, file })
    }

    /// Notes that the model uses a tensor.
    pub fn mark_used(&mut self, name: &str) {
        if let Some(name) = self.name_in_files(name).map(str::to_owned) {
            self.unused.remove(&name);
        }
        if let (Some(_), Some(module)) = (&self.quantisation, name.strip_suffix(WEIGHT)) {
            for suffix in quantised::SUFFIXES {
                if let Some(name) = self.name_in_files(&format!("{module}.{suffix}")).map(str::to_owned) {
                    self.unused.remove(&name);
                }
            }
        }
    }

    /// True if two tensors have the same type, shape and contents. `None` if the files lack one of them.
    pub fn are_equal(&self, one: &str, other: &str) -> Option<bool> {
        let find = |name: &str| {
            let name = self.name_in_files(name)?;
            let file = &self.files[self.file_of[name]];
            Some((&file.header.tensors[name], &file.map[file.extent(name)]))
        };
        let ((one, one_bytes), (other, other_bytes)) = (find(one)?, find(other)?);
        Some(one.dtype == other.dtype && one.shape == other.shape && one_bytes == other_bytes)
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

    /// Returns the names of the tensors that are not marked, sorted.
    #[cfg(feature = "fuzzing")]
    pub fn unused(&self) -> impl Iterator<Item = &str> {
        self.unused.iter().map(String::as_str)
    }

    /// Says which tensors the model does not use; `None` if it uses all. In a group of several ranks, experts are used
    /// by some rank.
    pub fn describe_unused(&self, group_rank: GroupRank) -> Option<String> {
        let of_ranks = |name: &&str| group_rank.is_alone() || !name.contains(".experts.");
        let unused: Vec<&str> = self.unused.iter().map(String::as_str).filter(of_ranks).collect();
        let used = self.file_of.keys().map(String::as_str).filter(|name| !self.unused.contains(*name));
        unused::describe(&unused, used)
    }
}

impl WeightFile {
    fn open(path: PathBuf) -> Result<Self, LoadError> {
        let read = |source| LoadError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read)?;
        // SAFETY: the file is mapped for reading only. If another process truncates the file, this process gets a
        // SIGBUS. If another process rewrites the file, the weights change. Every loader that maps files accepts this,
        // to avoid a copy.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        if let Some(problem) = contents::lfs_pointer(&map) {
            return Err(LoadError::Weights { path, problem: problem.into() });
        }
        match Header::parse(&map) {
            Ok(header) => Ok(Self { path, map: Arc::new(map), header }),
            Err(error) => Err(match error.tensor {
                Some(name) => LoadError::Tensor { path, name, problem: error.problem },
                None => LoadError::Weights { path, problem: error.problem },
            }),
        }
    }

    /// Returns the range of the tensor's bytes in the file. `Header::parse` has checked that the range lies within the
    /// file.
    fn extent(&self, name: &str) -> std::ops::Range<usize> {
        let (start, end) = self.header.tensors[name].data_offsets;
        self.header.data_start + start..self.header.data_start + end
    }
}

/// Returns the paths of the files that an index names, without repetitions, sorted by name.
pub(super) fn indexed_paths(dir: &Path, index: &Path) -> Result<BTreeSet<PathBuf>, LoadError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }

    let map = read_json::<Index>(index)?.weight_map;
    let mut paths = BTreeSet::new();
    for (name, file) in map {
        // An index is untrusted, so a name that leads out of the directory is refused.
        let mut components = Path::new(&file).components();
        if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
            let problem =
                format!("weight_map: {name:?} is mapped to {file:?}, which is not a plain file name");
            return Err(LoadError::Config { path: index.into(), problem });
        }
        paths.insert(dir.join(file));
    }
    Ok(paths)
}
