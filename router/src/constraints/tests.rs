use futures_util::future::join_all;
use tutti_proto::{
    cluster::v1::ModelDescription,
    v1::{self, Sampling, constraint::Kind},
};
use tutti_runtime::ErrorKind;

use super::*;
use crate::{
    served::ServedText,
    test_support::{self, VOCAB, word_piece_tokenizer},
    text::tokenizer::Tokenizer,
};

const ME: Share = Share::WITHOUT_KEY;

fn model(tokenizer: Option<Arc<Tokenizer>>) -> ServedModel {
    let text =
        ServedText { tokenizer, template: None, defaults: Sampling::default(), dialect: Default::default() };
    let description =
        ModelDescription { vocab_size: VOCAB, eos_token_ids: vec![261], ..ModelDescription::default() };
    ServedModel { description, text: Arc::new(text) }
}

fn byte_level() -> ServedModel {
    model(Some(test_support::tokenizer()))
}

fn given(kind: Kind) -> v1::Constraint {
    v1::Constraint { kind: Some(kind), ..Default::default() }
}

fn schema(schema: &str) -> v1::Constraint {
    given(Kind::JsonSchema(v1::JsonSchema { schema: schema.to_owned(), strict: false }))
}

fn text_of(error: &Error) -> (Option<&str>, &str) {
    (error.field(), error.message())
}

#[tokio::test]
async fn a_constraint_is_compiled_once_and_then_known() {
    let (checks, model) = (ConstraintChecks::with_threads(1), byte_level());
    let bad = schema(r#"{"properties": {"a": {"not": {}}}}"#);
    for by in [CheckedBy::Compiling, CheckedBy::Known] {
        assert_eq!(checks.check(schema(r#"{"type": "null"}"#), &model, ME).await, Ok(by));
        let error = checks.check(bad.clone(), &model, ME).await.unwrap_err();
        let expected = (Some("constraint.schema.properties.a.not"), "cannot be enforced");
        assert_eq!((text_of(&error), error.kind()), (expected, ErrorKind::InvalidArgument));
    }
    // Strict mode is part of what is known.
    let strict = Kind::JsonSchema(v1::JsonSchema { schema: r#"{"type": "null"}"#.into(), strict: true });
    let error = checks.check(given(strict), &model, ME).await.unwrap_err();
    assert_eq!(error.field(), Some("constraint.schema.type"));
}

#[tokio::test]
async fn another_model_s_tokens_have_checks_of_their_own() {
    let checks = ConstraintChecks::with_threads(1);
    let (first, mut second) = (byte_level(), byte_level());
    let null = || schema(r#"{"type": "null"}"#);
    assert_eq!(checks.check(null(), &first, ME).await, Ok(CheckedBy::Compiling));
    assert_eq!(checks.check(null(), &second, ME).await, Ok(CheckedBy::Compiling));
    second.description.eos_token_ids.clear();
    let error = checks.check(null(), &second, ME).await.unwrap_err();
    let message = "cannot be enforced for this model: vocabulary has no token that ends a generation";
    assert_eq!(text_of(&error), (Some("constraint"), message));
}

#[tokio::test]
async fn tokenizers_without_bytes_are_refused_with_the_reason() {
    let checks = ConstraintChecks::with_threads(1);
    let message = "needs a tokenizer, and the server runs with skip_tokenizer_init";
    let error = checks.check(schema("{}"), &model(None), ME).await.unwrap_err();
    assert_eq!(text_of(&error), (Some("constraint"), message));
    let error = checks.check(schema("{}"), &model(Some(word_piece_tokenizer())), ME).await.unwrap_err();
    let message =
        "cannot be enforced for this model: tokenizer.json has a decoder whose tokens have no known bytes";
    assert_eq!(text_of(&error), (Some("constraint"), message));
    for tokenizer in [test_support::metaspace_tokenizer(), test_support::byte_fallback_tokenizer()] {
        let model = model(Some(tokenizer));
        assert_eq!(checks.check(schema("{}"), &model, ME).await, Ok(CheckedBy::Compiling));
    }
}

#[tokio::test]
async fn a_grammar_names_special_tokens_by_text_and_added_ones_by_id() {
    let (checks, model) = (ConstraintChecks::with_threads(1), byte_level());
    let check = async |lark: &str| checks.check(given(Kind::Lark(lark.into())), &model, ME).await;
    // 263 is `<think>`, which is an added token and no special one.
    for lark in ["start: <|role|> \"a\"", "start: <[262]> \"a\"", "start: <[263]> \"a\""] {
        assert_eq!(check(lark).await, Ok(CheckedBy::Compiling), "{lark}");
    }
    let error = check("start: <think> \"a\"").await.unwrap_err();
    assert!(error.message().contains("unknown special token"), "{error}");
    assert!(!error.message().contains('\0'), "{error}");
}

#[tokio::test]
async fn an_enormous_constraint_is_refused_before_it_is_parsed() {
    let (checks, model) = (ConstraintChecks::with_threads(1), byte_level());
    for kind in [
        Kind::Regex("a".repeat(600_000)),
        Kind::Lark("a".repeat(600_000)),
        Kind::JsonSchema(v1::JsonSchema { schema: " ".repeat(600_000), strict: false }),
        Kind::Choice(v1::Choices { texts: vec!["a".repeat(20); 30_000] }),
    ] {
        let error = checks.check(given(kind), &model, ME).await.unwrap_err();
        assert!(error.message().ends_with("the limit is 524288"), "{error}");
        assert_eq!(error.field(), Some("constraint"));
    }
    let error = checks.check(given(Kind::Regex("a".repeat(10_000))), &model, ME).await.unwrap_err();
    assert_eq!(text_of(&error), (Some("constraint.regex"), "has 10000 bytes; the limit is 8192"));
}

/// Schemas that take tens of milliseconds each, all different.
fn costly(n: usize) -> v1::Constraint {
    let values: Vec<String> = (0..2000).map(|value| format!("\"{n} {value}\"")).collect();
    schema(&format!(r#"{{"enum": [{}]}}"#, values.join(",")))
}

#[tokio::test]
async fn a_flood_of_one_caller_delays_another_by_one_check() {
    let (checks, model) = (ConstraintChecks::with_threads(1), byte_level());
    let order = Mutex::new(Vec::new());
    let (flood, one) = (Share::of_key("flood"), Share::of_address([127, 0, 0, 1].into()));
    let of = |given: v1::Constraint, share: Share| {
        let (checks, model, order) = (&checks, &model, &order);
        async move {
            checks.check(given, model, share).await.unwrap();
            order.lock().push(share);
        }
    };
    let mut waiting: Vec<_> = (0..20).map(|n| Box::pin(of(costly(n), flood))).collect();
    for check in &mut waiting {
        assert!(futures_util::poll!(check.as_mut()).is_pending());
    }
    tokio::join!(join_all(waiting), of(schema(r#"{"type": "null"}"#), one));
    let position = order.lock().iter().position(|share| *share == one);
    assert!(position.is_some_and(|ahead| ahead <= 2), "{position:?}");
}

#[tokio::test]
async fn a_flood_of_one_caller_leaves_room_and_known_constraints_do_not_wait() {
    let (checks, model) = (ConstraintChecks::with_threads(1), byte_level());
    let flood = Share::of_key("flood");
    assert_eq!(checks.check(schema("{}"), &model, flood).await, Ok(CheckedBy::Compiling));
    let mut waiting: Vec<_> =
        (0..MAX_WAITING).map(|n| Box::pin(checks.check(costly(n), &model, flood))).collect();
    let mut refused = 0;
    for check in &mut waiting {
        if let std::task::Poll::Ready(result) = futures_util::poll!(check.as_mut()) {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Overloaded);
            refused += 1;
        }
    }
    assert!((20..60).contains(&refused), "{refused} were refused");
    assert_eq!(checks.check(schema("{}"), &model, flood).await, Ok(CheckedBy::Known));
    let mut other = Box::pin(checks.check(schema("true"), &model, Share::of_key("one")));
    assert!(futures_util::poll!(other.as_mut()).is_pending());
}

#[test]
fn a_position_keeps_its_place_behind_the_client_s_name() {
    let of = |field: &str| {
        let error = respell(Error::invalid(field, "is bad"), "guided_json");
        error.field().map(str::to_owned).unwrap_or_default()
    };
    assert_eq!(of("constraint"), "guided_json");
    assert_eq!(of("constraint.schema"), "guided_json");
    assert_eq!(of("constraint.schema.properties.a.not"), "guided_json.properties.a.not");
    assert_eq!(of("constraint.choice[3]"), "guided_json[3]");
    assert_eq!(of("constraints"), "constraints");
    assert_eq!(of("stop"), "stop");
}
