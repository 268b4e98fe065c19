//! Constraints under all of their names: whatever is accepted compiles on a worker and can be followed.

use std::sync::LazyLock;

use tutti_constraints::{
    CHECK_TIME, Constraint, ConstraintError, Declared, Environment, Progress, Vocabulary,
};
use tutti_proto::v1::{self as pb, constraint::Kind};

use crate::{http::fuzzing::constraint_of, test_support};

/// Maximum number of tokens of an output.
const MAX_TOKENS: usize = 24;
/// Maximum length in bytes of an error's message, and of its position.
const MAX_ERROR_BYTES: [usize; 2] = [512, 4096];

/// The environments of a router's checks and of a worker.
static ENVIRONMENTS: LazyLock<[Environment; 2]> = LazyLock::new(|| {
    let json = serde_json::from_slice(&test_support::tokenizer_json()).expect("a tokenizer");
    let declared = Declared { logits: test_support::VOCAB as usize, ends: &[261], ..Declared::default() };
    let checks = Vocabulary::for_checks(test_support::tokenizer().head(), &declared);
    let whole = Vocabulary::from_tokenizer_json(&json, &declared);
    [checks, whole]
        .map(|vocabulary| Environment::new(&vocabulary.expect("a vocabulary")).expect("an environment"))
});

/// Reads `text` as a constraint under the name that `name` selects, and checks it as a router does. Asserts that a
/// refusal is short. What is accepted is compiled as on a worker, and followed: `choices` select the tokens.
pub fn constraint(name: u8, text: &str, choices: &[u8]) {
    let json = || serde_json::Value::from(text).to_string();
    let of_text = |kind| Some(pb::Constraint { kind: Some(kind), whitespace: i32::from(name >> 4) % 3 });
    let lines = || text.lines().map(str::to_owned).collect();
    let given = match name % 12 {
        0 => constraint_of(&format!(r#"{{"response_format": {text}}}"#)),
        1 => constraint_of(&format!(r#"{{"structured_outputs": {text}}}"#)),
        2 => constraint_of(&format!(r#"{{"guided_json": {text}}}"#)),
        3 => constraint_of(&format!(r#"{{"guided_json": {}}}"#, json())),
        4 => constraint_of(&format!(r#"{{"structural_tag": {text}}}"#)),
        5 => constraint_of(&format!(r#"{{"guided_choice": {text}}}"#)),
        6 => constraint_of(text),
        7 => of_text(Kind::JsonSchema(pb::JsonSchema { schema: text.to_owned(), strict: true })),
        8 => of_text(Kind::JsonSchema(pb::JsonSchema { schema: text.to_owned(), strict: false })),
        9 => of_text(Kind::Regex(text.to_owned())),
        10 => of_text(Kind::Choice(pb::Choices { texts: lines() })),
        _ => of_text(Kind::Lark(text.to_owned())),
    };
    let Some(message) = given else { return };
    let [checks, worker] = &*ENVIRONMENTS;
    let constraint = match Constraint::from_message(message, None) {
        Ok(constraint) => constraint,
        Err(error) => return check_error(&error),
    };
    if let Err(error) = checks.check(&constraint, CHECK_TIME) {
        return check_error(&error);
    }
    let mut matcher = match worker.compile(&constraint) {
        Ok(matcher) => matcher,
        Err(error) => panic!("what a router accepts does not compile on a worker: {error}"),
    };
    let mut words = vec![0; matcher.mask_words()];
    for n in 0..MAX_TOKENS {
        let allowed = match matcher.mask(&mut words) {
            Ok(allowed) => allowed,
            // A limit of the work of masks ends one request.
            Err(error) if n > 0 => return check_error(&error),
            Err(error) => panic!("what a router accepts has no first token on a worker: {error}"),
        };
        assert!(allowed.tokens > 0);
        let tokens: Vec<u32> = (0..words.len() as u32 * 32).filter(|token| is_set(&words, *token)).collect();
        assert!(tokens.iter().all(|&token| token < test_support::VOCAB), "padding is allowed");
        let choice = choices.get(n).copied().unwrap_or_default();
        let token = tokens[usize::from(choice) % tokens.len()];
        match matcher.commit(token) {
            Ok(Progress::Continues) => {}
            Ok(Progress::Finished) => return,
            Err(error) => return check_error(&error),
        }
    }
}

fn is_set(words: &[u32], token: u32) -> bool {
    words[token as usize / 32] >> (token % 32) & 1 == 1
}

fn check_error(error: &ConstraintError) {
    let ConstraintError { path, message, .. } = error;
    let [most, most_of_path] = MAX_ERROR_BYTES;
    assert!(!message.is_empty() && message.len() <= most, "a message of {} bytes: {message}", message.len());
    assert!(path.len() <= most_of_path, "a position of {} bytes: {path}", path.len());
    assert!(!message.contains(|c: char| c.is_control()), "a message with control characters: {message:?}");
}
