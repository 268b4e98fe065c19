use proptest::prelude::*;

use super::*;

const GOOD: &str = r#"{"prompt": ["a", "é"], "temperature": 0.5,
    "logit_bias": {"5": -1}, "stop": ["x"], "stream": true, "stream_options": {"include_usage": true}}"#;

fn is_answered(body: &[u8]) {
    // Parsing any body gives a request or an error with a message, and never panics.
    if let Err(error) = parse(body, 1024) {
        assert!(!error.message().is_empty());
    }
}

#[test]
fn the_good_body_is_good() {
    assert_eq!(parse(GOOD.as_bytes(), 1024).ok().unwrap().request.prompts.len(), 2);
}

#[test]
fn a_list_of_millions_of_prompts_is_refused_where_the_limit_is_passed() {
    for item in [r#""""#, "[1]"] {
        let body = format!(r#"{{"prompt": [{}]}}"#, [item].repeat(1 << 20).join(","));
        let error = parse(body.as_bytes(), 1024).err().unwrap();
        assert_eq!((error.field(), error.message()), (Some("prompt"), "has more than 1024 items"));
    }
}

proptest! {
    #[test]
    fn a_damaged_body_is_answered(
        edits in prop::collection::vec((0..GOOD.len(), prop_oneof![any::<u8>(), Just(b'N'), Just(b'"')]), 1..6),
        end in 0..=GOOD.len(),
    ) {
        let mut body = GOOD.as_bytes().to_vec();
        for (index, byte) in edits {
            body[index] = byte;
        }
        is_answered(&body);
        is_answered(&body[..end]);
    }
}
