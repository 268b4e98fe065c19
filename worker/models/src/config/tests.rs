use super::*;

fn directory(generation: Option<&str>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    if let Some(text) = generation {
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
    }
    dir
}

#[test]
fn generation_config_overrides_the_config_and_may_name_several_ids() {
    let ids = |generation, config| eos_token_ids(directory(generation).path(), config, 100).unwrap();
    assert_eq!(ids(Some(r#"{"eos_token_id": [9, 3, 9]}"#), Some(TokenIds::One(1))), [3, 9]);
    assert_eq!(ids(Some(r#"{"eos_token_id": 4}"#), None), [4]);
    assert_eq!(ids(Some(r#"{"eos_token_id": null}"#), Some(TokenIds::One(1))), [1]);
    assert_eq!(ids(Some("{}"), Some(TokenIds::Many(vec![2, 1]))), [1, 2]);
    assert_eq!(ids(None, None), [0u32; 0]);
}

#[test]
fn the_tokenizer_s_own_end_token_is_an_end() {
    let ids = |files: &[(&str, &str)]| {
        let dir = directory(Some(r#"{"eos_token_id": 4}"#));
        files.iter().for_each(|(name, text)| std::fs::write(dir.path().join(name), text).unwrap());
        eos_token_ids(dir.path(), None, 100).unwrap()
    };
    let config = ("tokenizer_config.json", r#"{"eos_token": "<|im_end|>"}"#);
    let tokenizer = |id: u32| {
        format!(
            r#"{{"added_tokens": [{{"id": {id}, "content": "<|im_end|>"}}], "model": {{"vocab": {{"</s>": 7}}}}}}"#
        )
    };
    assert_eq!(ids(&[config]), [4]);
    assert_eq!(ids(&[config, ("tokenizer.json", tokenizer(9).as_str())]), [4, 9]);
    assert_eq!(ids(&[config, ("tokenizer.json", tokenizer(100).as_str())]), [4], "beyond the vocabulary");
    assert_eq!(ids(&[config, ("tokenizer.json", "{")]), [4]);
    // As in transformers, the older file holds unless the newer one lists the tokens.
    let map = ("special_tokens_map.json", r#"{"eos_token": {"content": "</s>"}}"#);
    assert_eq!(ids(&[config, map, ("tokenizer.json", tokenizer(9).as_str())]), [4, 7]);
    let listed = r#"{"eos_token": {"content": "</e>"}, "added_tokens_decoder": {"3": {"content": "</e>"}}}"#;
    assert_eq!(ids(&[("tokenizer_config.json", listed), map]), [3, 4]);
}

#[test]
fn a_damaged_generation_config_is_an_error_that_names_it() {
    let error = eos_token_ids(directory(Some(r#"{"eos_token_id": "x"}"#)).path(), None, 100).unwrap_err();
    assert!(error.to_string().contains("generation_config.json"), "{error}");
}

#[test]
fn both_spellings_of_a_dtype_are_known() {
    assert_eq!(parse_dtype("torch.bfloat16"), Some(WeightType::Bf16));
    assert_eq!(parse_dtype("float32"), Some(WeightType::F32));
    assert_eq!(parse_dtype("float8_e4m3fn"), None);
}
