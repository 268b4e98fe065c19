//! The text files of a checkpoint, made from the metadata of a GGUF file.

mod neutral;
mod rotation;
mod tokenizer;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::CheckpointFile;
use crate::{
    Error,
    gguf::{self, Header, TensorType},
};

/// An architecture of GGUF files.
struct Architecture {
    /// Value of `general.architecture`.
    name: &'static str,
    /// Name in a config's `architectures`.
    class: &'static str,
    model_type: &'static str,
    has_experts: bool,
}

const ARCHITECTURES: [Architecture; 4] = [
    Architecture { name: "llama", class: "LlamaForCausalLM", model_type: "llama", has_experts: false },
    Architecture { name: "qwen2", class: "Qwen2ForCausalLM", model_type: "qwen2", has_experts: false },
    Architecture { name: "qwen3", class: "Qwen3ForCausalLM", model_type: "qwen3", has_experts: false },
    Architecture {
        name: "qwen3moe",
        class: "Qwen3MoeForCausalLM",
        model_type: "qwen3_moe",
        has_experts: true,
    },
];

/// Keys of sizes without which a family's default would be taken.
const NEEDED: [&str; 7] = [
    "embedding_length",
    "block_count",
    "attention.head_count",
    "context_length",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
];

/// Maximum number of layers that are looked at for experts. The reader of the config refuses more.
const MAX_LAYERS: u64 = 10_000;

/// Returns the only GGUF file of a folder, or the first of the only split file. `None` if there are none or several.
pub(super) fn only_file(dir: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(dir).ok()?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_first = |path: &PathBuf| split_of(path).is_none_or(|(_, number, _)| number == 1);
    let mut files = paths.filter(|path| crate::gguf::is_file(path)).filter(is_first);
    let file = files.next()?;
    files.next().is_none().then_some(file)
}

/// Splits a name such as `model-00002-of-00003.gguf` into its stem, its number and their count. `None` for other names.
fn split_of(path: &Path) -> Option<(&str, usize, usize)> {
    let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (name, count) = name.rsplit_once("-of-")?;
    let (stem, number) = name.rsplit_once('-')?;
    let are_digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let digits = |text: &str| are_digits(text).then(|| text.parse().ok()).flatten();
    let (number, count) = (digits(number)?, digits(count)?);
    (1..=count).contains(&number).then_some((stem, number, count))
}

/// Returns the paths of all parts of the GGUF file `path`. The first part has the metadata.
pub fn files(path: &Path) -> Vec<PathBuf> {
    match split_of(path) {
        None => vec![path.to_owned()],
        Some((stem, _, count)) => {
            let part = |number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf"));
            (1..=count).map(part).collect()
        }
    }
}

/// Makes a text file from the metadata of the GGUF file `path`. `None` if the metadata have nothing for it.
pub(super) fn read(path: &Path, file: CheckpointFile) -> Result<Option<Vec<u8>>, Error> {
    let files = files(path);
    let mut header = Header::open(&files[0])?;
    for part in &files[1..] {
        header.tensors.extend(Header::open(part)?.tensors);
    }
    let value = match file {
        CheckpointFile::Config => {
            rotation::divisors(&files, &header).and_then(|divisors| config(&header, divisors)).map(Some)
        }
        CheckpointFile::GenerationConfig => tokenizer::generation_config(&header).map(Some),
        CheckpointFile::Tokenizer => tokenizer::tokenizer(&header).map(Some),
        CheckpointFile::TokenizerConfig => tokenizer::config(&header).map(Some),
        CheckpointFile::SpecialTokensMap | CheckpointFile::ChatTemplate => Ok(None),
    };
    let invalid = |problem: String| Error::invalid("model", format!("{}: {problem}", path.display()));
    Ok(value.map_err(invalid)?.map(|value| value.to_string().into_bytes()))
}

/// Makes a `config.json`. `divisors` are those of the rotary frequencies.
fn config(header: &Header, divisors: Option<Vec<f32>>) -> Result<Value, String> {
    let name = header.text("general.architecture")?.ok_or("general.architecture: is missing")?;
    let architecture = ARCHITECTURES.iter().find(|known| known.name == name).ok_or_else(|| {
        let supported = ARCHITECTURES.map(|known| known.name).join(", ");
        format!("general.architecture: {name:?} is not supported; supported: {supported}")
    })?;
    let key = |key: &str| format!("{name}.{key}");
    let mut config = Map::new();
    let mut set = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            config.insert(name.into(), value);
        }
    };
    set("architectures", Some(json!([architecture.class])));
    set("model_type", Some(json!(architecture.model_type)));
    let mut integers = vec![
        ("hidden_size", "embedding_length"),
        ("intermediate_size", "feed_forward_length"),
        ("num_hidden_layers", "block_count"),
        ("num_attention_heads", "attention.head_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("head_dim", "attention.key_length"),
        ("max_position_embeddings", "context_length"),
    ];
    if architecture.has_experts {
        let of_experts = [
            ("num_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
        ];
        integers.extend(of_experts);
        // llama.cpp normalises the weights of experts in this architecture whatever the metadata say.
        set("norm_topk_prob", Some(json!(true)));
        let layers = header.integer(&key("block_count"))?.unwrap_or(0).min(MAX_LAYERS);
        let is_dense =
            |layer: &u64| !header.tensors.contains_key(&format!("blk.{layer}.ffn_gate_exps.weight"));
        set("mlp_only_layers", Some((0..layers).filter(is_dense).collect()));
    } else if header.integer(&key("expert_count"))?.is_some_and(|experts| experts > 0) {
        return Err(format!("{}: experts are not supported in this architecture", key("expert_count")));
    }
    for (ours, theirs) in integers {
        let found = header.integer(&key(theirs))?;
        if found.is_none() && NEEDED.contains(&theirs) {
            return Err(format!("{}: is missing", key(theirs)));
        }
        set(ours, found.map(Value::from));
    }
    neutral::check(header, &key)?;
    let epsilon = key("attention.layer_norm_rms_epsilon");
    let found = header.number(&epsilon)?.ok_or_else(|| format!("{epsilon}: is missing"))?;
    set("rms_norm_eps", Some(found.into()));
    set("rope_theta", Some(header.number(&key("rope.freq_base"))?.unwrap_or(10_000.0).into()));
    set("rope_scaling", rotation::scaling(header, divisors, &key)?);
    let embedding =
        header.tensors.get("token_embd.weight").ok_or("tensor \"token_embd.weight\" is missing")?;
    set("vocab_size", embedding.shape.first().map(|&rows| rows.into()));
    set("tie_word_embeddings", Some((!header.tensors.contains_key("output.weight")).into()));
    let dtype = match embedding.dtype {
        _ if gguf::widens(header.tensors.iter()) => "float32",
        TensorType::F16 => "float16",
        TensorType::Bf16 => "bfloat16",
        _ => "float32",
    };
    set("dtype", Some(dtype.into()));
    let has_bias = header.tensors.contains_key("blk.0.attn_q.bias");
    if architecture.name == "llama" {
        set("attention_bias", Some(has_bias.into()));
    }
    Ok(Value::Object(config))
}
