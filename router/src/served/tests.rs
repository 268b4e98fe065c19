use super::*;
use tutti_proto::parameters::SamplingParams;

use crate::{test_support, text::tokenizer::SpecialTokens};

fn files(tokenizer: Option<Vec<u8>>, generation_config: &[u8]) -> TextFiles {
    TextFiles { tokenizer, generation_config: Some(generation_config.to_vec()), ..TextFiles::default() }
}

fn settings(skip_tokenizer_init: bool) -> TextSettings {
    TextSettings { skip_tokenizer_init, ..TextSettings::default() }
}

fn refused(files: &TextFiles, skip_tokenizer_init: bool) -> String {
    let error = ServedText::read(files, &settings(skip_tokenizer_init)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    error.field().unwrap().to_owned()
}

#[test]
fn a_missing_tokenizer_is_an_error_unless_text_is_off() {
    let bare = files(None, b"{}");
    assert_eq!(refused(&bare, false), "tokenizer");
    assert!(ServedText::read(&bare, &settings(true)).is_ok());
}

#[test]
fn broken_files_are_named() {
    let good = test_support::tokenizer_json();
    assert_eq!(refused(&files(Some(b"{}".to_vec()), b"{}"), false), "tokenizer");
    assert_eq!(refused(&files(Some(good.clone()), b"["), false), "generation_config");
    assert_eq!(refused(&files(Some(good.clone()), br#"{"top_p": "7"}"#), false), "generation_config");
    let broken = |config: Option<&[u8]>, template: Option<&[u8]>| TextFiles {
        tokenizer_config: config.map(<[u8]>::to_vec),
        chat_template: template.map(<[u8]>::to_vec),
        ..files(Some(good.clone()), b"{}")
    };
    assert_eq!(refused(&broken(Some(b"{"), None), false), "tokenizer_config");
    // Only chats need the template.
    let text = ServedText::read(&broken(None, Some(b"{% if %}")), &settings(false)).unwrap();
    let error = text.template().err().unwrap();
    assert_eq!(error.field(), Some("messages"));
    assert!(error.message().contains("does not compile"), "{error}");
}

#[test]
fn special_tokens_are_read_from_the_older_file_and_become_tokens() {
    let of = |config: &str, map: &str| {
        let files = TextFiles {
            tokenizer_config: Some(config.into()),
            special_tokens_map: Some(map.into()),
            chat_template: Some(b"{{ eos_token }}{{ image_token }}{{ messages[0].content }}".to_vec()),
            ..files(Some(test_support::tokenizer_json()), b"{}")
        };
        let text = ServedText::read(&files, &settings(false)).unwrap();
        let options = crate::text::template::RenderOptions::default();
        let messages = [crate::text::template::Message::new("user", "x")];
        let shown = text.template().unwrap().render(&messages, &options, 100).unwrap();
        (shown, text.tokenizer.unwrap())
    };
    let map = r#"{"eos_token": {"content": "</new>", "special": true}}"#;
    let (shown, tokenizer) =
        of(r#"{"eos_token": "</s>", "extra_special_tokens": {"image_token": "<i>"}}"#, map);
    assert_eq!(shown, "</new><i>x");
    let ids = tokenizer.encode("</new>", SpecialTokens::Exclude).unwrap();
    assert!(ids.len() == 1 && tokenizer.is_special(ids[0]), "{ids:?}");
    // The newer member of the other file takes the older file's place, and may add and mark tokens.
    let added = r#"{"eos_token": "</s>", "added_tokens_decoder": {
        "301": {"content": "</b>", "special": false}, "300": {"content": "</s>", "special": true}}}"#;
    let (shown, tokenizer) = of(added, map);
    assert_eq!(shown, "</s>x");
    let ids = tokenizer.encode("</s></b>", SpecialTokens::Exclude).unwrap();
    assert_eq!(ids.len(), 2);
    assert_eq!(
        (tokenizer.is_special(ids[0]), tokenizer.is_special(ids[1]), ids[1] - ids[0]),
        (true, false, 1)
    );
}

#[test]
fn sampling_defaults_are_read_and_other_fields_ignored() {
    let json = br#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}"#;
    let text = ServedText::read(&files(None, json), &settings(true)).unwrap();
    assert_eq!((text.defaults.temperature, text.defaults.top_k), (Some(0.6), Some(20)));
}

#[test]
fn a_checkpoint_that_does_not_sample_is_greedy_unless_asked() {
    let json = br#"{"do_sample": false, "temperature": 0.6}"#;
    let defaults = ServedText::read(&files(None, json), &settings(true)).unwrap().defaults;
    let temperature = |asked: Sampling| SamplingParams::complete(&asked, &defaults, || 0).temperature;
    assert_eq!(temperature(Sampling::default()), 0.0);
    assert_eq!(temperature(Sampling { temperature: Some(0.9), ..Sampling::default() }), 0.9);
}

#[test]
fn each_default_of_the_checkpoint_is_read_and_checked() {
    for number in &NUMBERS {
        let name = number.bounds.name;
        let read = |value: f32| {
            let mut warnings = Vec::new();
            let json = format!(r#"{{"{name}": {value}}}"#);
            let defaults = sampling_defaults(json.as_bytes(), &mut |warning| warnings.push(warning)).unwrap();
            ((number.of)(&SamplingParams::complete(&Sampling::default(), &defaults, || 0)), warnings)
        };
        let high = number.bounds.range.high;
        let wanted = if number.in_checkpoint { high } else { number.default };
        assert_eq!(read(high), (wanted, vec![]), "{name}");
        let (above, warnings) = read(high * 2.0);
        assert_eq!(above, if name == "temperature" { high } else { number.default }, "{name}");
        assert_eq!(warnings.len(), usize::from(number.in_checkpoint), "{name}");
        assert!(warnings.iter().all(|warning| warning.contains(name)), "{warnings:?}");
    }
}

/// Values that transformers 5.23 load.
#[test]
fn values_out_of_range_do_not_keep_the_server_from_starting() {
    let cases = [
        (r#"{"top_k": -1}"#, 0, 1.0, 0),
        (r#"{"top_k": 50.0}"#, 50, 1.0, 0),
        (r#"{"top_k": 1.5, "top_p": null}"#, 0, 1.0, 1),
        (r#"{"do_sample": false, "top_p": 0, "temperature": 0}"#, 0, 0.0, 1),
        (r#"{"temperature": 5}"#, 0, 2.0, 1),
        (r#"{"temperature": -1, "repetition_penalty": 0}"#, 0, 1.0, 2),
    ];
    for (json, top_k, temperature, warned) in cases {
        let mut warnings = Vec::new();
        let defaults = sampling_defaults(json.as_bytes(), &mut |warning| warnings.push(warning)).unwrap();
        let params = SamplingParams::complete(&Sampling::default(), &defaults, || 0);
        assert_eq!(
            (params.top_k, params.temperature, warnings.len()),
            (top_k, temperature, warned),
            "{json}"
        );
        assert!(params.check(0).is_ok(), "{json}");
    }
}
