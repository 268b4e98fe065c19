//! Tests of the loads of experts: which layers have loads, and how many tokens each load counts.

use crate::common::{
    MAX_STEP_TOKENS, config, generate, group::of_ranks_with_whole_experts, loaded, prompt, tensors,
    write_config, write_tensors,
};
use safetensors::tensor::Dtype;
use serde_json::json;
use tempfile::TempDir;
use tutti_models::{
    ExpertLoad,
    LoadFormat::{Auto, Dummy},
    Model, Quantize,
};

const EXPERTS: usize = 4;
const TOP_K: usize = 2;
/// Intermediate width per expert.
const WIDTH: usize = 8;
const PROMPT: usize = 21;
const OUTPUT: usize = 5;

/// Returns a checkpoint of three layers. The second layer is dense. In the first layer, all tokens choose the same
/// experts, because the router's logits are all 0. In the third layer, the choice depends on the token.
fn checkpoint() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let keys = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3,
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": WIDTH, "mlp_only_layers": [1],
        "vocab_size": 96,
    });
    write_config(dir.path(), &config(&keys));
    let mut tensors = tensors();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let (_, shape, bytes) = tensors.get_mut(name).unwrap();
        shape[0] = 96;
        bytes.truncate(96 * 48 * 4);
    }
    let third: Vec<_> = tensors
        .iter()
        .filter_map(|(name, tensor)| Some((name.strip_prefix("model.layers.1.")?.to_owned(), tensor.clone())))
        .collect();
    tensors.extend(third.into_iter().map(|(name, tensor)| (format!("model.layers.2.{name}"), tensor)));
    let bytes = |count: usize, value: &dyn Fn(usize) -> f32| {
        (0..count).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>()
    };
    for layer in [0, 2] {
        let mut add = |name: String, rows: usize, columns: usize, value: &dyn Fn(usize) -> f32| {
            let tensor = (Dtype::F32, vec![rows, columns], bytes(rows * columns, value));
            tensors.insert(format!("model.layers.{layer}.mlp.{name}"), tensor);
        };
        let scale = if layer == 0 { 0.0 } else { 1.0 };
        add("gate.weight".into(), EXPERTS, 48, &|i| scale * ((i * i) as f32).sin());
        for expert in 0..EXPERTS {
            let value = |i: usize| ((i + expert) as f32).cos() / 8.0;
            add(format!("experts.{expert}.gate_proj.weight"), WIDTH, 48, &value);
            add(format!("experts.{expert}.up_proj.weight"), WIDTH, 48, &value);
            add(format!("experts.{expert}.down_proj.weight"), 48, WIDTH, &value);
        }
    }
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

fn loads(model: &mut dyn Model) -> Vec<ExpertLoad> {
    // The call replaces the contents of `loads`.
    let mut loads = vec![ExpertLoad { layer: 9, experts: 9, tokens: 9, most: 9 }];
    model.expert_loads(&mut loads).unwrap();
    loads
}

#[test]
fn each_layer_with_experts_counts_its_tokens_since_the_start() {
    let dir = checkpoint();
    let prompt: Vec<u32> = prompt(PROMPT).iter().map(|token| token % 96).collect();
    let check = |model: &mut dyn Model| {
        assert_eq!(loads(model), [], "no layer has run");
        // Tokens before the restart do not count.
        generate(model, &[&prompt[..9]], usize::MAX, 1);
        model.restart_expert_loads().unwrap();
        assert_eq!(loads(model), []);
        generate(model, &[&prompt], usize::MAX, OUTPUT);
        // The last output token is sampled but not computed.
        let tokens = (PROMPT + OUTPUT - 1) as u64;
        let got = loads(model);
        let [first, last] = got[..] else { panic!("{got:?}") };
        let sum = tokens * TOP_K as u64;
        assert_eq!(first, ExpertLoad { layer: 0, experts: EXPERTS, tokens: sum, most: tokens });
        assert_eq!((last.layer, last.experts, last.tokens), (2, EXPERTS, sum));
        assert!(last.most < tokens && last.most * EXPERTS as u64 >= sum, "{last:?}");
        // Reading the loads does not reset them.
        generate(model, &[&prompt[..3]], usize::MAX, 1);
        assert_eq!(loads(model)[0].tokens, sum + 3 * TOP_K as u64);
        got
    };
    let alone = check(&mut *loaded(dir.path(), Auto));
    // A rank that holds half of the experts counts the tokens of all experts.
    assert_eq!(of_ranks_with_whole_experts(2, dir.path(), Auto, Quantize::None, check), alone);
}

#[test]
fn all_layers_of_a_hybrid_have_experts_and_a_dense_model_has_none() {
    let dir = tempfile::tempdir().unwrap();
    let layers = |keys| {
        write_config(dir.path(), &config(&keys));
        let mut model = loaded(dir.path(), Dummy);
        generate(&mut *model, &[&[3, 4, 5]], MAX_STEP_TOKENS, 2);
        loads(&mut *model).iter().map(|load| (load.layer, load.tokens)).collect::<Vec<_>>()
    };
    let hybrid = json!({
        "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH, "full_attention_interval": 2,
        "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    });
    assert_eq!(layers(hybrid), [(0, 8), (1, 8)]);
    assert_eq!(layers(json!({})), []);
}
