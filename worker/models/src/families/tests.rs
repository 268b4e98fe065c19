use std::{collections::BTreeSet, fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;
use tutti_settings::SimSettings;

use super::{
    FAMILIES, Family, Variant,
    sample::{examine, samples},
};
use crate::{
    LoadError, SimOptions,
    config::{ConfigFile, keys::Rule},
    sim_device,
};

/// Placeholder in a config for JSON that a [`Value`] cannot hold, such as 1e400.
const PLACEHOLDER: &str = "@";

/// A reader of configs: a family, or the simulated model.
enum Reader {
    Family(&'static Family),
    Sim,
}

impl Reader {
    fn all() -> impl Iterator<Item = Self> {
        FAMILIES.iter().map(Self::Family).chain([Self::Sim])
    }

    fn samples(&self) -> Vec<Value> {
        match self {
            Self::Family(family) => samples(family),
            Self::Sim => samples(&FAMILIES[0])[..1].to_vec(),
        }
    }

    /// Runs the part of loading that needs only the config. Returns the config file.
    fn read(&self, dir: &Path) -> Result<ConfigFile, LoadError> {
        let file = ConfigFile::read(dir)?;
        match self {
            Self::Family(family) => {
                // A changed value may make the config name another family, or no family at all.
                Family::of(&file)?;
                examine(family, &file, dir)?;
            }
            Self::Sim => {
                let settings = SimSettings::default();
                let options = SimOptions {
                    dir,
                    max_step_tokens: 64,
                    page_tokens: 16,
                    nodes: None,
                    rank: 0,
                    settings: &settings,
                };
                sim_device::load_file(&file, &options)?;
            }
        }
        Ok(file)
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Family(family) => family.architecture,
            Self::Sim => "sim",
        }
    }

    /// Reads `sample` with the values of the keys at these paths replaced. The new values are JSON texts.
    fn read_changed(
        &self,
        dir: &Path,
        sample: &Value,
        changes: &[(&str, &str)],
    ) -> Result<ConfigFile, LoadError> {
        let mut config = sample.clone();
        for (index, (path, _)) in changes.iter().enumerate() {
            let value = path.split('.').fold(&mut config, |value, key| &mut value[key]);
            *value = json!(format!("{PLACEHOLDER}{index}"));
        }
        let mut text = config.to_string();
        for (index, (_, json)) in changes.iter().enumerate() {
            text = text.replace(&format!("\"{PLACEHOLDER}{index}\""), json);
        }
        fs::write(dir.join("config.json"), text).unwrap();
        self.read(dir)
    }

    /// Returns the reader's sample configs, each with the paths and rules of all keys that the reader reads.
    fn keys(&self, dir: &Path) -> Vec<(Value, Vec<(String, Rule)>)> {
        let rules = |sample: Value| {
            let file = self.read_changed(dir, &sample, &[]);
            let file = file.unwrap_or_else(|error| panic!("{}: {error}", self.name()));
            (sample, file.rules().into_iter().collect())
        };
        self.samples().into_iter().map(rules).collect()
    }
}

/// Returns values that a key with this rule refuses, as JSON texts.
fn refused(rule: Rule) -> Vec<&'static str> {
    const HUGE: [&str; 3] = ["1000000000000", "9223372036854775808", "1e400"];
    let mut values = HUGE.to_vec();
    values.extend(["-1", "true", "\"many\"", "{\"a\": 1}", "[[]]", "[-1]", "[1.5]", "[1000000000000]"]);
    let but = |allowed: &'static str| -> Vec<_> {
        values.iter().copied().filter(|value| *value != allowed).collect()
    };
    match rule {
        Rule::Integer { least, .. } => {
            let zero = (least > 0).then_some("0");
            [values, vec!["1.5"], Vec::from_iter(zero)].concat()
        }
        Rule::Number { .. } => values,
        Rule::Flag => [but("true"), vec!["0", "1.5"]].concat(),
        Rule::Text => [but("\"many\""), vec!["0", "1.5"]].concat(),
        Rule::Choice(_) | Rule::Any | Rule::Integers { .. } | Rule::TokenIds { .. } => {
            [values, vec!["1.5"]].concat()
        }
        Rule::Numbers { .. } => [but("[1.5]"), vec!["0", "[0]", "[null]"]].concat(),
        Rule::Texts { .. } => [values, vec!["0", "1.5", "[null]"]].concat(),
        Rule::Object => [but("{\"a\": 1}"), vec!["0", "1.5"]].concat(),
    }
}

/// The readers record every key that they read, so this test covers new keys, too.
#[test]
fn no_key_of_any_family_takes_a_value_of_absurd_size_sign_or_type() {
    let dir = tempfile::tempdir().unwrap();
    for reader in Reader::all() {
        for (sample, keys) in reader.keys(dir.path()) {
            for (path, rule) in keys {
                for value in refused(rule) {
                    let read = reader.read_changed(dir.path(), &sample, &[(path.as_str(), value)]);
                    let Err(error) = read else { panic!("{}: {path} may be {value}", reader.name()) };
                    let error = error.to_string();
                    assert!(
                        error.contains("config.json")
                            && [": ", "."].iter().any(|end| error.contains(&format!("{path}{end}"))),
                        "{}: {path} as {value}: {error}",
                        reader.name()
                    );
                }
                // transformers writes null for an absent key.
                if let Err(error) = reader.read_changed(dir.path(), &sample, &[(path.as_str(), "null")]) {
                    let (error, name) = (error.to_string(), path.rsplit('.').next().unwrap());
                    let named = error.contains(name) || error.contains(": is missing");
                    assert!(named, "{}: {path} as null: {error}", reader.name());
                }
            }
        }
    }
}

/// Every pair of sizes at their limits is accepted, or refused with an error that names one of the two keys. An
/// overflow of a product would panic in this build.
#[test]
fn sizes_at_their_limits_make_no_product_that_overflows() {
    let dir = tempfile::tempdir().unwrap();
    for reader in Reader::all() {
        let (sample, keys) = reader.keys(dir.path()).remove(0);
        let integer = |(path, rule): (String, Rule)| match rule {
            Rule::Integer { most, .. } => Some((path, most.to_string())),
            _ => None,
        };
        let keys: Vec<_> = keys.into_iter().filter_map(integer).collect();
        assert!(keys.iter().any(|(path, _)| path.ends_with("vocab_size")));
        for (first, most) in &keys {
            for (second, most_of_second) in &keys {
                let changes = [(&**first, &**most), (&**second, &**most_of_second)];
                if let Err(error) = reader.read_changed(dir.path(), &sample, &changes) {
                    let error = error.to_string();
                    let named = |path: &str| error.contains(path.rsplit('.').next().unwrap());
                    assert!(named(first) || named(second), "{}: {first}, {second}: {error}", reader.name());
                }
            }
        }
        let changes: Vec<_> = keys.iter().map(|(path, most)| (&**path, &**most)).collect();
        let _ = reader.read_changed(dir.path(), &sample, &changes);
    }
}

#[test]
fn products_above_their_limits_are_refused_by_the_names_of_their_keys() {
    let dir = tempfile::tempdir().unwrap();
    for (architecture, changes, expected) in [
        (
            "LlamaForCausalLM",
            &[("num_attention_heads", "65536"), ("head_dim", "65536")][..],
            "num_attention_heads x head_dim: 65536 x 65536 is 4294967296, the limit is 1048576",
        ),
        (
            "LlamaForCausalLM",
            &[("vocab_size", "16777216"), ("hidden_size", "1048576")],
            "vocab_size x hidden_size: 16777216 x 1048576 is 17592186044416, the limit is 68719476736",
        ),
        (
            "Qwen3MoeForCausalLM",
            &[("num_hidden_layers", "4096"), ("num_experts", "1024")],
            "num_hidden_layers x num_experts: 4096 x 1024 is 4194304, the limit is 131072",
        ),
        (
            "Qwen3_5ForCausalLM",
            &[
                ("num_hidden_layers", "4096"),
                ("linear_key_head_dim", "65536"),
                ("linear_value_head_dim", "65536"),
            ],
            "num_hidden_layers x linear_num_value_heads x linear_key_head_dim x linear_value_head_dim: ",
        ),
        (
            "Qwen3ForCausalLM",
            &[("rope_scaling", r#"{"type": "yarn", "factor": 1e4}"#)],
            "rope_scaling.factor: 10000 times original_max_position_embeddings, 4096, is 40960000, the limit is \
             16777216",
        ),
    ] {
        let family = FAMILIES.iter().find(|family| family.architecture == architecture).unwrap();
        let read = Reader::Family(family).read_changed(dir.path(), &samples(family)[0], changes);
        let error = read.err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_family_is_found_by_its_architecture_or_without_one_by_its_type() {
    let found = |value: Value| Family::of(&ConfigFile::of_value(value)).map(|family| family.architecture);
    for family in FAMILIES {
        assert_eq!(
            found(json!({"architectures": ["Other", family.architecture]})).unwrap(),
            family.architecture
        );
        assert_eq!(found(json!({"model_type": family.model_type})).unwrap(), family.architecture);
        let error = found(json!({"architectures": ["Other"], "model_type": family.model_type})).unwrap_err();
        assert!(error.to_string().contains(family.architecture), "{error}");
    }
}

/// Returns the table rows of a page in docs/ that name an architecture.
fn rows(page: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = fs::read_to_string(path).unwrap();
    text.lines().filter(|line| line.starts_with('|') && line.contains("For")).map(str::to_owned).collect()
}

/// Returns the names of the architectures in these table rows.
fn architectures(rows: &[String]) -> BTreeSet<&str> {
    let names = rows.iter().flat_map(|row| row.split('`'));
    names.filter(|name| name.ends_with("ForCausalLM") || name.ends_with("ForConditionalGeneration")).collect()
}

#[test]
fn the_docs_say_of_every_family_where_it_is() {
    let page = rows("adding-a-model.md");
    assert_eq!(architectures(&page), FAMILIES.iter().map(|family| family.architecture).collect());
    for Family { architecture, models, source, .. } in FAMILIES {
        let row = page.iter().find(|row| row.contains(&format!("`{architecture}`"))).unwrap();
        let source = format!("worker/models/src/{source}");
        assert!(row.contains(models) && row.contains(&source), "{models}, {source}: {row}");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(&source);
        assert!(path.is_file(), "{source} is no file");
    }
    let served = |family: &&Family| {
        matches!(family.variant, Variant::Llama(_) | Variant::Qwen35(_) | Variant::DeepseekV4)
    };
    let served = FAMILIES.iter().filter(served).map(|family| family.architecture).collect();
    assert_eq!(architectures(&rows("operations.md")), served);
}

#[test]
fn ends_of_sequences_in_the_generation_config_are_checked_as_those_in_the_config() {
    let dir: TempDir = tempfile::tempdir().unwrap();
    let family = &FAMILIES[0];
    for value in ["1000000000000", "-1", "1.5", "1e400", "\"x\"", "[-1]", "{}", "true"] {
        fs::write(dir.path().join("generation_config.json"), format!("{{\"eos_token_id\": {value}}}"))
            .unwrap();
        let read = Reader::Family(family).read_changed(dir.path(), &samples(family)[0], &[]);
        let error = read.err().unwrap().to_string();
        assert!(
            error.contains("generation_config.json") && error.contains("eos_token_id: "),
            "{value}: {error}"
        );
    }
}

/// The limits permit the shapes of the largest models of each architecture.
#[test]
fn the_largest_published_shapes_are_within_the_limits() {
    let dir = tempfile::tempdir().unwrap();
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192});
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144});
    for config in [
        // Llama 3.1 405B.
        json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 16_384, "intermediate_size": 53_248,
               "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128_256,
               "max_position_embeddings": 131_072, "rope_theta": 5e5, "rope_scaling": scaling}),
        // LLaMA 65B, which has no grouped-query attention, with the context of the Llama 3 variant for 4 million
        // tokens.
        json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 22_016,
               "num_hidden_layers": 80, "num_attention_heads": 64, "vocab_size": 32_000,
               "max_position_embeddings": 4_194_304, "rope_theta": 4.6e10}),
        // Qwen3 235B with YaRN over a million tokens.
        json!({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096, "intermediate_size": 12_288,
               "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
               "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "vocab_size": 151_936,
               "max_position_embeddings": 262_144, "max_window_layers": 94, "rope_scaling": yarn}),
        // Qwen3.5 397B.
        json!({"architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 60,
               "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
               "num_experts_per_tok": 10, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
               "linear_num_key_heads": 16, "linear_num_value_heads": 64, "vocab_size": 248_320,
               "max_position_embeddings": 262_144}),
        // DeepSeek-V4 Pro.
        json!({"architectures": ["DeepseekV4ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
               "num_attention_heads": 128, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
               "q_lora_rank": 1536, "o_groups": 16, "o_lora_rank": 1024, "n_routed_experts": 384,
               "num_experts_per_tok": 6, "moe_intermediate_size": 3072, "routed_scaling_factor": 2.5,
               "vocab_size": 129_280, "max_position_embeddings": 1_048_576, "rope_theta": 1e4,
               "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536}}),
    ] {
        let file = ConfigFile::of_value(config);
        examine(Family::of(&file).unwrap(), &file, dir.path()).unwrap();
    }
}

#[test]
fn a_family_that_is_unknown_is_refused_with_the_nearest_ones() {
    let refused = |config: Value| Family::of(&ConfigFile::of_value(config)).unwrap_err().to_string();
    let near = refused(json!({ "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next" }));
    assert!(
        near.contains("\"Qwen3NextForCausalLM\"") && near.contains("the nearest that are supported: Qwen3"),
        "{near}"
    );
    assert!(!near.contains("Mistral"), "{near}");
    let near = refused(json!({ "architectures": ["MixtralForCausalLM"] }));
    assert!(near.ends_with("the nearest that are supported: MistralForCausalLM"), "{near}");
    let near = refused(json!({ "model_type": "qwen3_tts" }));
    assert!(near.contains("the nearest that are supported: Qwen3ForCausalLM"), "{near}");
    // A name that is near to none gets all.
    for config in [json!({ "architectures": ["UnheardOfForCausalLM"] }), json!({})] {
        let all = refused(config);
        assert!(FAMILIES.iter().all(|family| all.contains(family.architecture)), "{all}");
    }
}
