//! Compares prompts and texts with those of Hugging Face transformers, which tests/texts/generate.py has written down.
//! `REFERENCE_TEXTS` is the folder of its files; without it, the tests skip themselves and say so.

use std::{
    env, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;
use serde_json::{Map, Value};
use tutti_proto::{cluster::v1::ModelDescription, parameters::Scope};
use tutti_settings::ChatSpecialTokens;

use super::{fields::Fields, messages};
use crate::{
    generation::{Length, to_tokens},
    served::{ServedModel, ServedText, TextFiles, TextSettings},
    text::{
        detokenizer::{Detokenizer, Unfinished},
        tokenizer::SpecialTokens,
    },
};

/// A folder of one family.
#[derive(Deserialize)]
struct Family {
    /// The source of the tokenizer.
    kind: String,
    cases: Vec<Case>,
    texts: Vec<Text>,
}

/// A conversation. Without `ids`, the template refuses it.
#[derive(Deserialize)]
struct Case {
    messages: Value,
    options: Map<String, Value>,
    /// False if the template loses a message's text.
    shown: bool,
    text: Option<String>,
    ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

/// Names, expectations and models of all families.
fn families() -> Vec<(String, Family, ServedModel)> {
    let Some(root) = env::var_os("REFERENCE_TEXTS") else {
        eprintln!("skipped: REFERENCE_TEXTS is not set (tests/texts/run sets it)");
        return Vec::new();
    };
    let folders = fs::read_dir(root).unwrap();
    let mut folders: Vec<PathBuf> = folders.map(|folder| folder.unwrap().path()).collect();
    folders.sort();
    let read = |folder: PathBuf| {
        let family: Family = serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        (name, family, model(&folder))
    };
    folders.into_iter().map(read).collect()
}

fn model(folder: &Path) -> ServedModel {
    let read = |name: &str| fs::read(folder.join(name)).ok();
    let files = TextFiles {
        tokenizer: read("tokenizer.json"),
        tokenizer_config: read("tokenizer_config.json"),
        special_tokens_map: read("special_tokens_map.json"),
        chat_template: read("chat_template.jinja"),
        generation_config: None,
    };
    let tokens = 1 << 20;
    let description = ModelDescription {
        vocab_size: tokens,
        max_context_tokens: tokens,
        max_request_tokens: tokens,
        ..ModelDescription::default()
    };
    ServedModel { description, text: Arc::new(ServedText::read(&files, &TextSettings::default()).unwrap()) }
}

/// Says where a case differs from what is expected; `None` if it does not.
fn difference(case: &Case, model: &ServedModel) -> Option<String> {
    let mut body = case.options.clone();
    body.insert("messages".into(), case.messages.clone());
    let body = Value::Object(body).to_string();
    let mut fields = Fields::of_body(body.as_bytes(), Scope::Chat).unwrap();
    let prompt = messages::take(&mut fields).unwrap().prompt;
    let found = to_tokens(prompt, &[], model, Length::OfPrompt, ChatSpecialTokens::Text);
    match (found, &case.ids) {
        (Err(_), None) => None,
        (Err(_), Some(_)) if !case.shown => None,
        (Ok((ids, Some(text))), Some(expected)) if ids == *expected && Some(&text) == case.text.as_ref() => {
            None
        }
        (Ok((_, text)), _) => Some(format!("{body}\n  is {text:?}\n  not {:?}", case.text)),
        (Err(error), _) => Some(format!("{body}\n  is refused: {error}\n  not {:?}", case.text)),
    }
}

#[test]
fn prompts_are_those_of_transformers() {
    let mut differences = Vec::new();
    for (name, family, model) in families() {
        let found: Vec<String> = family.cases.iter().filter_map(|case| difference(case, &model)).collect();
        let equal = family.cases.len() - found.len();
        println!("{name} ({}): {equal} of {} conversations are equal", family.kind, family.cases.len());
        differences.extend(found.into_iter().map(|difference| format!("{name}: {difference}")));
    }
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn texts_and_echoes_are_those_of_transformers() {
    for (name, family, model) in families() {
        let tokenizer = model.text.tokenizer.as_ref().unwrap();
        for Text { text, ids, decoded } in &family.texts {
            assert_eq!(&tokenizer.encode(text, SpecialTokens::Include).unwrap(), ids, "{name}: {text:?}");
            assert_eq!(&tokenizer.decode(ids, SpecialTokens::Include).unwrap(), decoded, "{name}: {text:?}");
            for at in 1..ids.len() {
                let (prompt, output) = ids.split_at(at);
                let mut echo = Detokenizer::new(tokenizer.clone(), SpecialTokens::Include);
                let mut shown: String = prompt.iter().map(|&id| echo.push(id).text).collect();
                let mut rest =
                    Detokenizer::after(prompt, tokenizer.clone(), SpecialTokens::Include, Unfinished::Shown);
                shown.extend(output.iter().map(|&id| rest.push(id).text));
                shown.push_str(&rest.flush());
                assert_eq!(&shown, decoded, "{name}: {text:?} after {at} of {ids:?}");
            }
            let bytes: Vec<u8> = ids.iter().skip(1).flat_map(|&id| tokenizer.token_bytes(id)).collect();
            if let Some(&first) = ids.first() {
                let mut output = Detokenizer::after(
                    &[first],
                    tokenizer.clone(),
                    SpecialTokens::Include,
                    Unfinished::Hidden,
                );
                let mut message: String = ids[1..].iter().map(|&id| output.push(id).text).collect();
                message.push_str(&output.flush());
                if let Ok(bytes) = String::from_utf8(bytes) {
                    assert_eq!(message, bytes, "{name}: {text:?}");
                }
            }
        }
    }
}
