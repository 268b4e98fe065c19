//! The keys of `config.json` and `generation_config.json` that all families share.

use std::{
    fs::File,
    io::{self, BufReader},
    path::{Path, PathBuf},
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tutti_kernels::WeightType;

use crate::LoadError;

/// A checkpoint's `config.json`: the keys that name the checkpoint's family, and all keys, which that family parses.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    /// Path of the file.
    pub path: PathBuf,
    /// `architectures`; empty if missing.
    pub architectures: Vec<String>,
    /// `model_type`.
    pub model_type: Option<String>,
    /// All keys.
    pub value: Value,
}

/// The keys that are read before the family is known.
#[derive(Deserialize)]
struct Head {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    quantization_config: Option<Value>,
}

impl ConfigFile {
    /// Reads `dir/config.json`. Refuses quantised checkpoints, which no family supports.
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let path = dir.join("config.json");
        let value: Value = read_json(&path)?;
        let head: Head = Head::deserialize(&value).map_err(|e| malformed(&path, &e))?;
        if let Some(quantization) = head.quantization_config {
            let method = quantization.get("quant_method").unwrap_or(&quantization);
            let problem = format!(
                "quantization_config: {method} weights are not supported; \
                 supported: float32, float16 and bfloat16 weights"
            );
            return Err(LoadError::Config { path, problem });
        }
        let architectures = head.architectures.unwrap_or_default();
        Ok(Self { path, architectures, model_type: head.model_type, value })
    }

    /// Deserialises the file's keys as `T`, the set of keys that a family reads.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, LoadError> {
        serde_path_to_error::deserialize(&self.value).map_err(|error| {
            let (key, problem) = (error.path().to_string(), error.into_inner());
            self.invalid(if key == "." { problem.to_string() } else { format!("{key}: {problem}") })
        })
    }

    /// Returns the object under `key` as a file of its own; `None` if the key is missing or null.
    pub fn section(&self, key: &str) -> Option<Self> {
        let value = self.value.get(key).filter(|value| !value.is_null())?.clone();
        let Self { path, architectures, model_type, .. } = self;
        Some(Self {
            path: path.clone(),
            architectures: architectures.clone(),
            model_type: model_type.clone(),
            value,
        })
    }

    /// Returns an error about this file.
    pub fn invalid(&self, problem: impl Into<String>) -> LoadError {
        LoadError::Config { path: self.path.clone(), problem: problem.into() }
    }
}

/// The value of `eos_token_id`: one id or several.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub(crate) enum TokenIds {
    One(u32),
    Many(Vec<u32>),
}

impl TokenIds {
    fn into_sorted(self) -> Vec<u32> {
        let mut ids = match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        };
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

/// Returns the token ids that end a sequence, ascending. As in transformers' `generate`, the ids in
/// `dir/generation_config.json` take precedence over `from_config`.
pub(crate) fn eos_token_ids(dir: &Path, from_config: Option<TokenIds>) -> Result<Vec<u32>, LoadError> {
    #[derive(Deserialize)]
    struct GenerationConfig {
        eos_token_id: Option<TokenIds>,
    }

    let generation = match read_json::<GenerationConfig>(&dir.join("generation_config.json")) {
        Ok(config) => config.eos_token_id,
        Err(LoadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    Ok(generation.or(from_config).map(TokenIds::into_sorted).unwrap_or_default())
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

/// Reads a JSON file.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    let file = File::open(path).map_err(|source| LoadError::Read { path: path.into(), source })?;
    serde_json::from_reader(BufReader::new(file)).map_err(|e| malformed(path, &e))
}

fn malformed(path: &Path, error: &serde_json::Error) -> LoadError {
    LoadError::Config { path: path.into(), problem: format!("malformed JSON: {error}") }
}

#[cfg(test)]
mod tests;
