//! The safetensors files of a checkpoint, mapped into memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    path::{Component, Path, PathBuf},
};

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::tensor::Dtype;
use serde::Deserialize;
use tutti_kernels::{HostMatrix, WeightType};

use super::{TensorSpec, header::Header};
use crate::{LoadError, config::read_json};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The weight files of a directory: one, or the shards that an index names.
pub(crate) struct SafetensorsDir {
    dir: PathBuf,
    shards: Vec<Shard>,
    /// Tensor name → place in `shards`.
    places: HashMap<String, usize>,
    unused: BTreeSet<String>,
}

struct Shard {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

impl SafetensorsDir {
    /// Maps the files and reads their headers; no tensor is read yet.
    pub fn open(dir: &Path) -> Result<Self, LoadError> {
        let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
        let mut shards = Vec::new();
        if single.exists() {
            shards.push(Shard::open(single)?);
        } else if index.exists() {
            for path in shard_paths(dir, &index)? {
                shards.push(Shard::open(path)?);
            }
        } else {
            let problem = format!("holds no weights: neither {SINGLE} nor {INDEX}");
            return Err(LoadError::Weights { path: dir.into(), problem });
        }

        let mut places: HashMap<String, usize> = HashMap::new();
        for (place, shard) in shards.iter().enumerate() {
            for name in shard.header.tensors.keys() {
                if let Some(other) = places.insert(name.clone(), place) {
                    let problem = format!("is also in {}", shards[other].path.display());
                    return Err(LoadError::Tensor { path: shard.path.clone(), name: name.clone(), problem });
                }
            }
        }
        let unused = places.keys().cloned().collect();
        Ok(Self { dir: dir.into(), shards, places, unused })
    }

    /// The type of a tensor, after checking that it is there, of a type that is taken, and of the expected shape.
    pub fn check(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        let name = &spec.name;
        let Some(&place) = self.places.get(name) else {
            let (files, shape) = (self.shards.len(), &spec.shape);
            let problem = format!("of shape {shape:?} is in none of its {files} safetensors files");
            return Err(LoadError::Tensor { path: self.dir.clone(), name: name.clone(), problem });
        };
        let shard = &self.shards[place];
        let info = &shard.header.tensors[name];
        let fault =
            |problem: String| LoadError::Tensor { path: shard.path.clone(), name: name.clone(), problem };
        if info.shape != spec.shape {
            let (found, expected) = (&info.shape, &spec.shape);
            return Err(fault(format!("has shape {found:?}, but config.json asks for {expected:?}")));
        }
        match info.dtype {
            Dtype::F32 => Ok(WeightType::F32),
            Dtype::F16 => Ok(WeightType::F16),
            Dtype::BF16 => Ok(WeightType::Bf16),
            other => Err(fault(format!("is of type {other}; supported: F32, F16, BF16"))),
        }
    }

    /// The error for a tensor that is to be fused with another of a different type.
    pub fn differs(&self, spec: &TensorSpec, with: &TensorSpec) -> LoadError {
        let dtype = |spec: &TensorSpec| self.shards[self.places[&spec.name]].header.tensors[&spec.name].dtype;
        let problem = format!("is of type {}, but {:?} is of type {}", dtype(spec), with.name, dtype(with));
        let path = self.shards[self.places[&spec.name]].path.clone();
        LoadError::Tensor { path, name: spec.name.clone(), problem }
    }

    /// A tensor's bytes, in place.
    pub fn view(&self, spec: &TensorSpec) -> Result<HostMatrix<'_>, LoadError> {
        let dtype = self.check(spec)?;
        let shard = &self.shards[self.places[&spec.name]];
        let (rows, columns) = spec.rows_columns();
        Ok(HostMatrix { bytes: &shard.map[shard.extent(&spec.name)], dtype, rows, columns })
    }

    /// Gives a tensor's pages back to the system: the device holds its own copy now. They stay in the page cache.
    pub fn release(&mut self, spec: &TensorSpec) {
        self.unused.remove(&spec.name);
        let shard = &self.shards[self.places[&spec.name]];
        let extent = shard.extent(&spec.name);
        // SAFETY: the mapping is a shared, read-only one of a file and is never written through; pages dropped here are
        // read from the file again if something touches them later, with the same contents.
        let released = unsafe {
            shard.map.unchecked_advise_range(UncheckedAdvice::DontNeed, extent.start, extent.len())
        };
        if let Err(error) = released {
            tracing::debug!(tensor = spec.name, %error, "could not release a tensor's mapped pages");
        }
    }

    /// The tensors that nothing has taken over, in order of name.
    pub fn unused(&self) -> impl Iterator<Item = &str> {
        self.unused.iter().map(String::as_str)
    }
}

impl Shard {
    fn open(path: PathBuf) -> Result<Self, LoadError> {
        let read = |source| LoadError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(read)?;
        // SAFETY: the file is mapped for reading only. Whoever shortens it meanwhile gets us killed by SIGBUS, and
        // whoever rewrites it changes weights: the price of not copying them, paid by every loader that maps.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
        match Header::parse(&map) {
            Ok(header) => Ok(Self { path, map, header }),
            Err(error) => Err(match error.tensor {
                Some(name) => LoadError::Tensor { path, name, problem: error.problem },
                None => LoadError::Weights { path, problem: error.problem },
            }),
        }
    }

    /// Where the tensor's bytes are in the file; the header was checked against its length.
    fn extent(&self, name: &str) -> std::ops::Range<usize> {
        let (start, end) = self.header.tensors[name].data_offsets;
        self.header.data_start + start..self.header.data_start + end
    }
}

/// The files an index names, each once, in order of name.
fn shard_paths(dir: &Path, index: &Path) -> Result<BTreeSet<PathBuf>, LoadError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }

    let map = read_json::<Index>(index)?.weight_map;
    let mut paths = BTreeSet::new();
    for (name, file) in map {
        // An index is data from elsewhere: it may not reach out of its directory.
        let mut components = Path::new(&file).components();
        if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
            let problem =
                format!("weight_map: {name:?} is said to be in {file:?}, which is not a plain file name");
            return Err(LoadError::Config { path: index.into(), problem });
        }
        paths.insert(dir.join(file));
    }
    Ok(paths)
}
