use serde_json::json;
use tutti_proto::cluster::v1::{ModelDescription, TopLogprob};

use super::*;
use crate::{served::ServedText, test_support};

/// Words with and without a space, a letter and its byte, two ids that no token has, and the sampled token.
const IDS: [u32; 8] = [257, 259, 0x61, 258, 0x62, 300, 301, 256];

fn model() -> ServedModel {
    let tokenizer = Some(test_support::byte_fallback_tokenizer());
    let text = ServedText { tokenizer, template: None, defaults: Default::default(), dialect: Default::default() };
    ServedModel { description: ModelDescription::default(), text: Arc::new(text) }
}

fn sampled(id: u32) -> OutputToken {
    let top = IDS.iter().map(|&token_id| TopLogprob { token_id, logprob: -1.0 }).collect();
    OutputToken { id, logprob: Some(TokenLogprob { logprob: -1.0, rank: 1, top }), offset: 0 }
}

#[test]
fn alternatives_never_collide_and_words_keep_their_space() {
    let model = model();
    for own in IDS {
        let token = sampled(own);
        let mut lists = CompletionLogprobs::default();
        lists.push_output(&model, std::slice::from_ref(&token), 0);
        let lists = serde_json::to_value(lists).unwrap();
        let top = lists["top_logprobs"][0].as_object().unwrap();
        assert_eq!(top.len(), IDS.len(), "{top:?}");
        // The sampled token is found by its string.
        assert!(top.contains_key(lists["tokens"][0].as_str().unwrap()), "{top:?}");
        let chat = serde_json::to_value(ChatLogprobs::new(&model, &[token])).unwrap();
        let mut names: Vec<&str> = chat["content"][0]["top_logprobs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t["token"].as_str().unwrap())
            .collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), IDS.len(), "{names:?}");
    }
    let chat = serde_json::to_value(ChatLogprobs::new(&model, &[sampled(259)])).unwrap();
    assert_eq!(chat["content"][0]["token"], " a");
    assert_eq!(chat["content"][0]["bytes"], json!([32, 97]));
}
