//! Quantisation of a checkpoint on disk: reads a plain checkpoint and writes one that compressed-tensors describes,
//! which transformers reads, too.
//!
//! Quantised are the matrices that `--quantize` also quantises at load, except embeddings and LM heads. All other
//! tensors and files are copied. No more than one matrix is in memory at a time.

mod codes;
mod config;
mod output;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, tensor::TensorInfo};
use serde_json::{Value, json};
use tutti_kernels::WeightType;
use tutti_runtime::{checkpoint::CheckpointFile, gguf};

pub use self::codes::CodeError;
use self::{
    codes::Codes,
    output::{OutputFile, OutputTensor},
};
use crate::{
    LoadError, LoadFormat, LoadOptions, Quantize,
    config::{ConfigFile, quantisation::QUANTIZATION_CONFIG, read_json},
    inspect::{self, Projections},
    weights::{SafetensorsDir, SourceFile, TensorSpec},
};

/// Ends of the names of files that hold weights, or that list them.
const WEIGHT_FILES: [&str; 9] = [
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".bin.index.json",
];
/// Name of the index of several files.
const INDEX: &str = "model.safetensors.index.json";

/// The form of quantised matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantiserScheme {
    /// Integers of four bits with a scale for each group of this number of inputs: `pack-quantized`.
    Int4 {
        /// Number of inputs per scale.
        group: usize,
    },
    /// Integers of eight bits with a scale per output: `int-quantized`.
    Int8,
    /// Floats of type e4m3 with a scale per output: `float-quantized`.
    Fp8,
}

/// The outcome for a matrix.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It is quantised, with this error.
    Quantised(CodeError),
    /// It stays as it was, for this reason.
    Kept(String),
}

/// The report of one matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct ModuleReport {
    /// Name of the module in the files, without `.weight`.
    pub module: String,
    /// Outputs and inputs.
    pub shape: [usize; 2],
    /// The outcome for it.
    pub outcome: Outcome,
    /// Number of matrices so far, this one included.
    pub done: usize,
    /// Number of matrices in total.
    pub total: usize,
}

/// Sizes before and after, in bytes of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of all tensors of the source.
    pub before: u64,
    /// Bytes of all tensors that were written.
    pub after: u64,
}

/// Quantises the checkpoint in `dir` and writes it to the new folder `out`. Calls `report` after each matrix.
///
/// The config gets its place last, so `out` is a whole checkpoint or none. After an error, nothing is left. Errors name
/// the file, and the key or tensor at fault.
pub fn quantise_checkpoint(
    dir: &Path,
    out: &Path,
    scheme: QuantiserScheme,
    report: &mut dyn FnMut(ModuleReport) -> Result<(), LoadError>,
) -> Result<Sizes, LoadError> {
    if gguf::is_file(dir) {
        let problem = "a GGUF file cannot be quantised: it needs a folder of safetensors".into();
        return Err(LoadError::Weights { path: dir.into(), problem });
    }
    let config = read_json::<Value>(&dir.join(CheckpointFile::Config.name()))?;
    if config.get(QUANTIZATION_CONFIG).is_some_and(|section| !section.is_null()) {
        return Err(ConfigFile::read(dir)?
            .invalid(format!("{QUANTIZATION_CONFIG}: the weights are quantised already")));
    }
    let plan = Plan::new(dir, scheme)?;
    let partial = Partial::create(out)?;
    let sizes = plan.write(&partial.path, report)?;
    copy_other_files(dir, &partial.path)?;
    let Value::Object(mut config) = config else {
        return Err(ConfigFile::read(dir)?.invalid("it must be an object"));
    };
    config.insert(QUANTIZATION_CONFIG.into(), config::section(scheme, &plan.ignored()));
    write_json(&partial.path.join(CheckpointFile::Config.name()), &Value::Object(config))?;
    partial.finish()?;
    Ok(sizes)
}

/// The tensors of a checkpoint, and what is done with each.
struct Plan {
    files: SafetensorsDir,
    scheme: QuantiserScheme,
    /// The matrices of layers, by their names in the files: the outputs and inputs, and why a matrix is kept.
    matrices: HashMap<String, ([usize; 2], Option<String>)>,
    /// Name of the embedding in the files.
    embedding: Option<String>,
}

impl Plan {
    /// Checks the presence, shape and type of all matrices.
    fn new(dir: &Path, scheme: QuantiserScheme) -> Result<Self, LoadError> {
        let options = LoadOptions {
            kv_cache_dtype: crate::KvCacheDtype::Auto,
            dir: dir.into(),
            load_format: LoadFormat::Auto,
            quantize: Quantize::None,
            max_step_tokens: 1,
            page_tokens: 16,
            expert_parallel: false,
            nodes: None,
            seed: 0,
        };
        let Projections { matrices: specs, embedding } = inspect::projections(&options)?;
        let files = SafetensorsDir::open(dir)?;
        let mut matrices = HashMap::with_capacity(specs.len());
        for spec in &specs {
            files.check(spec)?;
            let name = files.name_in_files(&spec.name).unwrap_or(&spec.name).to_owned();
            if spec.dims.matrices != 1 || spec.dims.transposed {
                let problem = "is a stack of experts, which cannot be quantised".into();
                return Err(LoadError::Tensor { path: dir.into(), name, problem });
            }
            let TensorSpec { dims, .. } = spec;
            let kept = scheme.refuses(dims.columns);
            matrices.insert(name, ([dims.rows, dims.columns], kept));
        }
        let embedding = files.name_in_files(&embedding).map(str::to_owned);
        Ok(Self { files, scheme, matrices, embedding })
    }

    /// Returns the names of modules with plain matrices. Embeddings are no linear layers, and an LM head is named also
    /// where it is tied, since readers know it as a linear layer.
    fn ignored(&self) -> Vec<String> {
        let mut names = vec!["lm_head".to_owned()];
        for file in self.files.source_files() {
            for (name, info, _) in file.tensors() {
                let Some(module) = name.strip_suffix(".weight") else { continue };
                let is_plain = self.matrices.get(name).is_none_or(|(_, kept)| kept.is_some());
                if is_plain
                    && info.shape.len() >= 2
                    && Some(name) != self.embedding.as_deref()
                    && module != names[0]
                {
                    names.push(module.to_owned());
                }
            }
        }
        names.sort_unstable();
        names
    }

    /// Writes all files of weights.
    fn write(
        &self,
        to: &Path,
        report: &mut dyn FnMut(ModuleReport) -> Result<(), LoadError>,
    ) -> Result<Sizes, LoadError> {
        let (mut sizes, mut done) = (Sizes::default(), 0);
        let mut weight_map = BTreeMap::new();
        let mut is_indexed = false;
        for file in self.files.source_files() {
            let file_name = file.name();
            is_indexed |= file_name != "model.safetensors";
            let output = OutputFile::create(&to.join(&file_name), self.outputs(&file))?;
            sizes.after += output.bytes();
            weight_map.extend(output.names().map(|name| (name.to_owned(), Value::from(file_name.clone()))));
            for (name, info, bytes) in file.tensors() {
                sizes.before += bytes.len() as u64;
                let Some((shape, kept)) = self.matrices.get(name) else {
                    output.write(name, bytes)?;
                    continue;
                };
                done += 1;
                let module = name.strip_suffix(".weight").unwrap_or(name);
                let outcome = match kept {
                    Some(reason) => {
                        output.write(name, bytes)?;
                        Outcome::Kept(reason.clone())
                    }
                    None => Outcome::Quantised(self.quantise(&file, name, (info, bytes), &output)?),
                };
                let total = self.matrices.len();
                report(ModuleReport { module: module.into(), shape: *shape, outcome, done, total })?;
            }
            output.finish()?;
        }
        if is_indexed {
            let index = json!({ "metadata": { "total_size": sizes.after }, "weight_map": weight_map });
            write_json(&to.join(INDEX), &index)?;
        }
        Ok(sizes)
    }

    /// Returns the tensors that are written for those of a file.
    fn outputs(&self, file: &SourceFile<'_>) -> Vec<OutputTensor> {
        let mut outputs = Vec::new();
        for (name, info, _) in file.tensors() {
            match (self.matrices.get(name), weight_type(info)) {
                (Some((shape, None)), Some(dtype)) => {
                    let module = name.strip_suffix(".weight").unwrap_or(name);
                    outputs.extend(self.scheme.tensors(module, *shape, dtype));
                }
                _ => outputs.push(OutputTensor {
                    name: name.into(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                }),
            }
        }
        outputs
    }

    /// Quantises one matrix and writes its tensors.
    fn quantise(
        &self,
        file: &SourceFile<'_>,
        name: &str,
        (info, bytes): (&TensorInfo, &[u8]),
        output: &OutputFile,
    ) -> Result<CodeError, LoadError> {
        let fault =
            |problem: String| LoadError::Tensor { path: file.path.into(), name: name.into(), problem };
        // `Plan::new` has checked the type and the shape.
        let dtype = weight_type(info).ok_or_else(|| fault(format!("is of type {}", info.dtype)))?;
        let columns = info.shape.last().copied().unwrap_or(0);
        let Codes { codes, scales, error } = codes::quantise(self.scheme, bytes, dtype, columns)
            .map_err(|row| fault(format!("has a number in row {row} that is not finite")))?;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        for tensor in self.scheme.tensors(module, [info.shape[0], columns], dtype) {
            let part = tensor.name.strip_prefix(module).unwrap_or_default();
            match part {
                ".weight_shape" => {
                    let sizes = [info.shape[0], columns].map(|size| (size as i64).to_le_bytes());
                    output.write(&tensor.name, sizes.as_flattened())?;
                }
                ".weight_scale" => output.write(&tensor.name, &scales)?,
                _ => output.write(&tensor.name, &codes)?,
            }
        }
        Ok(error)
    }
}

impl QuantiserScheme {
    /// Returns why a matrix with `inputs` inputs stays plain; `None` if it is quantised.
    fn refuses(self, inputs: usize) -> Option<String> {
        match self {
            Self::Int4 { group } if !inputs.is_multiple_of(group) => {
                Some(format!("its {inputs} inputs are not a multiple of {group}"))
            }
            _ => None,
        }
    }

    /// Returns the tensors of a quantised module. Scales have the type that the weights had.
    fn tensors(self, module: &str, [rows, columns]: [usize; 2], dtype: WeightType) -> Vec<OutputTensor> {
        let scale = match dtype {
            WeightType::F32 => Dtype::F32,
            WeightType::F16 => Dtype::F16,
            WeightType::Bf16 => Dtype::BF16,
        };
        let tensor = |suffix: &str, dtype, shape: [usize; 2]| OutputTensor {
            name: format!("{module}.{suffix}"),
            dtype,
            shape: shape.to_vec(),
        };
        match self {
            Self::Int4 { group } => vec![
                tensor("weight_packed", Dtype::I32, [rows, columns.div_ceil(codes::PER_WORD)]),
                tensor("weight_scale", scale, [rows, columns / group]),
                OutputTensor { name: format!("{module}.weight_shape"), dtype: Dtype::I64, shape: vec![2] },
            ],
            Self::Int8 => {
                vec![tensor("weight", Dtype::I8, [rows, columns]), tensor("weight_scale", scale, [rows, 1])]
            }
            Self::Fp8 => {
                vec![
                    tensor("weight", Dtype::F8_E4M3, [rows, columns]),
                    tensor("weight_scale", scale, [rows, 1]),
                ]
            }
        }
    }
}

/// Returns the type of a tensor's elements; `None` if they are no weights.
fn weight_type(info: &TensorInfo) -> Option<WeightType> {
    match info.dtype {
        Dtype::F32 => Some(WeightType::F32),
        Dtype::F16 => Some(WeightType::F16),
        Dtype::BF16 => Some(WeightType::Bf16),
        _ => None,
    }
}

/// The folder `out` while it is written. All files are in a folder within it until the last one is written. Unless the
/// checkpoint is finished, they are removed, and `out` too if it was created.
struct Partial<'a> {
    out: &'a Path,
    path: PathBuf,
    is_created: bool,
}

impl<'a> Partial<'a> {
    /// Creates the folder. `out` must not exist, or must be empty.
    fn create(out: &'a Path) -> Result<Self, LoadError> {
        let fault = |source| LoadError::Write { path: out.into(), source };
        let is_created = match fs::read_dir(out) {
            Ok(mut entries) => match entries.next() {
                None => false,
                Some(_) => {
                    let taken = io::Error::new(io::ErrorKind::AlreadyExists, "the folder is not empty");
                    return Err(fault(taken));
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(error) => return Err(fault(error)),
        };
        let path = out.join(".partial");
        fs::create_dir_all(&path).map_err(fault)?;
        Ok(Self { out, path, is_created })
    }

    /// Moves all files to their places. A folder without a config is no checkpoint, so the config is the last.
    fn finish(mut self) -> Result<(), LoadError> {
        let config = CheckpointFile::Config.name();
        let fault = |source| LoadError::Write { path: self.out.into(), source };
        let move_file = |name: &OsStr| fs::rename(self.path.join(name), self.out.join(name)).map_err(fault);
        for entry in fs::read_dir(&self.path).map_err(fault)? {
            let name = entry.map_err(fault)?.file_name();
            if name != config {
                move_file(&name)?;
            }
        }
        move_file(config.as_ref())?;
        self.is_created = false;
        Ok(())
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        // An error here comes after another one, which says more.
        let _ = fs::remove_dir_all(&self.path);
        if self.is_created {
            let _ = fs::remove_dir(self.out);
        }
    }
}

/// Copies the files of a checkpoint that hold no weights, such as those of the tokenizer.
fn copy_other_files(from: &Path, to: &Path) -> Result<(), LoadError> {
    let read = |source| LoadError::Read { path: from.into(), source };
    for entry in fs::read_dir(from).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let holds_weights = WEIGHT_FILES.iter().any(|end| name.ends_with(end));
        // A checkpoint of a hub's cache consists of links to files.
        if holds_weights || name == CheckpointFile::Config.name() || !path.is_file() {
            continue;
        }
        let target = to.join(name);
        fs::copy(&path, &target).map_err(|source| LoadError::Write { path: target, source })?;
    }
    Ok(())
}

/// Writes a JSON file in lines.
fn write_json(path: &Path, value: &Value) -> Result<(), LoadError> {
    let text = format!("{value:#}\n");
    fs::write(path, text).map_err(|source| LoadError::Write { path: path.into(), source })
}
