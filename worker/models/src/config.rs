//! Reading of `config.json` and `generation_config.json`. [`ranges`] declares each key and the values that it may have,
//! [`keys`] reads keys, and [`text`] reads the keys that all text models have.

pub(crate) mod keys;
pub(crate) mod quantisation;
pub(crate) mod ranges;
pub(crate) mod text;
mod tokenizer_end;

#[cfg(test)]
use std::{cell::RefCell, collections::BTreeMap};
use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tutti_kernels::WeightType;
use tutti_runtime::{
    checkpoint::{Checkpoint, CheckpointFile, contents},
    gguf,
};

#[cfg(test)]
use self::keys::Rule;
use self::{keys::Keys, quantisation::Quantisation};
use crate::LoadError;

/// A checkpoint's `config.json` or `generation_config.json`.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    object: Map<String, Value>,
    /// Rules of all keys that have been read, by the keys' paths.
    #[cfg(test)]
    read: RefCell<BTreeMap<String, Rule>>,
}

/// The keys by which a checkpoint names its family.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Names {
    /// `architectures`; empty if missing.
    pub architectures: Vec<String>,
    pub model_type: Option<String>,
}

impl ConfigFile {
    /// Reads `dir/config.json`. Refuses weights in a form that this build does not read.
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let file = Self::of_checkpoint(dir, CheckpointFile::Config)?;
        file.quantisation()?;
        Ok(file)
    }

    /// Reads a file of the checkpoint in `dir`. If `dir` is a GGUF file, its metadata are read.
    fn of_checkpoint(dir: &Path, file: CheckpointFile) -> Result<Self, LoadError> {
        if !gguf::is_file(dir) {
            return Self::open(dir.join(file.name()));
        }
        let refuse = |problem: &str| LoadError::Weights { path: dir.into(), problem: problem.into() };
        let bytes = Checkpoint::open(dir, "").and_then(|checkpoint| checkpoint.read(file));
        let bytes = bytes.map_err(|error| {
            let prefix = format!("{}: ", dir.display());
            refuse(error.message().strip_prefix(&prefix).unwrap_or(error.message()))
        })?;
        match serde_json::from_slice(&bytes.unwrap_or_default()) {
            Ok(Value::Object(object)) => Ok(Self::of(dir.into(), object)),
            _ => Err(refuse("has metadata that are no config")),
        }
    }

    /// Reads how the weights are quantised; `None` if they are not.
    pub fn quantisation(&self) -> Result<Option<Quantisation>, LoadError> {
        Quantisation::read(&self.keys())
    }

    /// Reads `dir/name`; `None` if there is no such file.
    pub fn optional(dir: &Path, name: &str) -> Result<Option<Self>, LoadError> {
        match Self::open(dir.join(name)) {
            Ok(file) => Ok(Some(file)),
            Err(LoadError::Read { source, .. })
                if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn open(path: PathBuf) -> Result<Self, LoadError> {
        match read_json::<Value>(&path)? {
            Value::Object(object) => Ok(Self::of(path, object)),
            _ => Err(malformed(&path, "it must be an object")),
        }
    }

    fn of(path: PathBuf, object: Map<String, Value>) -> Self {
        Self {
            path,
            object,
            #[cfg(test)]
            read: RefCell::default(),
        }
    }

    /// Returns the file's top-level keys.
    pub fn keys(&self) -> Keys<'_> {
        Keys::of(self, &self.object)
    }

    /// Reads the keys that name the checkpoint's family.
    pub fn names(&self) -> Result<Names, LoadError> {
        let keys = self.keys();
        let architectures = keys.get(&ranges::ARCHITECTURES)?.unwrap_or_default();
        Ok(Names { architectures, model_type: keys.get(&ranges::MODEL_TYPE)? })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns an error about this file.
    pub fn invalid(&self, problem: impl Into<String>) -> LoadError {
        LoadError::Config { path: self.path.clone(), problem: problem.into() }
    }
}

/// Constructors and views for tests.
#[cfg(test)]
impl ConfigFile {
    /// Returns a config with the keys of the object `value`.
    pub fn of_value(value: Value) -> Self {
        match value {
            Value::Object(object) => Self::of("config.json".into(), object),
            other => panic!("{other} is not an object"),
        }
    }

    /// Records that a key is read, and its rule.
    fn note(&self, path: String, rule: Rule) {
        self.read.borrow_mut().insert(path, rule);
    }

    /// Returns the rules of all keys that have been read, by the keys' paths.
    pub fn rules(&self) -> BTreeMap<String, Rule> {
        self.read.borrow().clone()
    }
}

/// Refuses keys that describe quantised weights, in an object where no family reads them.
pub(crate) fn refuse_quantization(keys: &Keys<'_>) -> Result<(), LoadError> {
    let key = &ranges::QUANTIZATION_CONFIG;
    let Some(quantization) = keys.get(key)? else { return Ok(()) };
    let method = quantization.get("quant_method").unwrap_or(&quantization);
    let problem =
        format!("{method} weights are not supported here; supported: quantization_config beside text_config");
    Err(keys.invalid(key, problem))
}

/// The value of `eos_token_id`: one id or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

/// Returns the token ids that end a sequence, ascending. As in transformers' `generate`, the ids in
/// `dir/generation_config.json` take precedence over `from_config`. As in vLLM and SGLang, the tokenizer's own end
/// token is one of them, if the vocabulary has it.
pub(crate) fn eos_token_ids(
    dir: &Path,
    from_config: Option<TokenIds>,
    vocab_size: usize,
) -> Result<Vec<u32>, LoadError> {
    let generation = match ConfigFile::of_checkpoint(dir, CheckpointFile::GenerationConfig) {
        Ok(file) => file.keys().get(&ranges::EOS_TOKEN_ID)?,
        Err(LoadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut ids = match generation.or(from_config) {
        Some(TokenIds::One(id)) => vec![id],
        Some(TokenIds::Many(ids)) => ids,
        None => Vec::new(),
    };
    ids.extend(tokenizer_end::read(dir).filter(|&id| (id as usize) < vocab_size));
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Parses the value of a config's `dtype` or `torch_dtype`, two spellings of one key.
pub(crate) fn parse_dtype(name: &str) -> Option<WeightType> {
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" | "float" => Some(WeightType::F32),
        "float16" | "half" => Some(WeightType::F16),
        "bfloat16" => Some(WeightType::Bf16),
        _ => None,
    }
}

/// Reads a JSON file. An error names the key at fault, even if the value is a number too large for a float.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    let unreadable = |source| LoadError::Read { path: path.into(), source };
    let mut file = BufReader::new(File::open(path).map_err(unreadable)?);
    if let Some(problem) = contents::lfs_pointer(file.fill_buf().map_err(unreadable)?) {
        return Err(LoadError::Config { path: path.into(), problem: problem.into() });
    }
    let mut json = serde_json::Deserializer::from_reader(file);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let (key, problem) = (error.path().to_string(), error.into_inner());
        malformed(path, &if key == "." { problem.to_string() } else { format!("{key}: {problem}") })
    })?;
    json.end().map_err(|error| malformed(path, &error.to_string()))?;
    Ok(value)
}

fn malformed(path: &Path, problem: &str) -> LoadError {
    LoadError::Config { path: path.into(), problem: format!("malformed JSON: {problem}") }
}

#[cfg(test)]
mod tests;
