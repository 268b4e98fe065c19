use super::*;
use crate::gguf::Value;

/// Checks a model of four heads of 64 elements with these further keys.
fn checked(further: &[(&str, Value)]) -> Result<(), String> {
    let sizes = [("attention.head_count", Value::Integer(4)), ("embedding_length", Value::Integer(256))];
    let keys = sizes.iter().chain(further).map(|(key, value)| (format!("llama.{key}"), value.clone()));
    let header = Header { metadata: keys.collect(), tensors: Default::default() };
    check(&header, &|key| format!("llama.{key}"))
}

#[test]
fn keys_that_change_nothing_pass() {
    assert_eq!(checked(&[]), Ok(()));
    let neutral = [
        ("attention.scale", Value::Float(0.0)),
        ("attention.sliding_window", Value::Integer(0)),
        ("rope.dimension_count", Value::Integer(64)),
        ("attention.value_length", Value::Integer(64)),
        ("rope.scaling.factor", Value::Float(1.0)),
        ("rope.scaling.attn_factor", Value::Float(1.0)),
        ("expert_weights_norm", Value::Flag(true)),
        ("attention.causal", Value::Flag(true)),
    ];
    assert_eq!(checked(&neutral), Ok(()));
    let scaled =
        [("rope.scaling.type", Value::Text("yarn".into())), ("rope.scaling.factor", Value::Float(4.0))];
    assert_eq!(checked(&scaled), Ok(()));
}

#[test]
fn keys_that_change_the_model_are_named() {
    for (key, value) in [
        ("attention.scale", Value::Float(0.5)),
        ("attention.sliding_window", Value::Integer(4096)),
        ("final_logit_softcapping", Value::Float(30.0)),
        ("rope.dimension_count", Value::Integer(32)),
        ("attention.value_length", Value::Integer(128)),
        ("rope.scaling.factor", Value::Float(4.0)),
        ("rope.scale_linear", Value::Float(4.0)),
        ("expert_weights_norm", Value::Flag(false)),
        ("attention.causal", Value::Flag(false)),
    ] {
        let problem = checked(&[(key, value)]).unwrap_err();
        assert!(problem.starts_with(&format!("llama.{key}: ")), "{problem}");
    }
}
