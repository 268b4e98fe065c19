//! Tests of scripts: the right answer for each turn, whatever surrounds the patterns.

use serde_json::{Value, json};

use super::*;

const TURN: [u32; 2] = [7, 8];
const END: u32 = 9;

fn contents() -> Value {
    json!({
        "turn": TURN, "openings": [[30, 31]], "end": END,
        "scripts": [
            {"marker": [1, 2, 1], "answers": [[20, 21, 22], [23]]},
            {"marker": [1, 2, 3], "answers": [[25]]},
        ],
    })
}

fn made(contents: Value) -> Result<Script, String> {
    Script::new(serde_json::from_value(contents).unwrap(), 40)
}

/// The tokens that follow a prompt, up to the end.
fn answer(script: &Script, prompt: &[&[u32]]) -> Vec<u32> {
    let mut state = prompt.iter().copied().flatten().fold(0, |state, token| script.extend(state, *token));
    let mut tokens = Vec::new();
    while tokens.last() != Some(&END) {
        tokens.push(script.token(state));
        state = script.extend(state, tokens[tokens.len() - 1]);
    }
    tokens
}

#[test]
fn the_nth_turn_behind_the_marker_has_the_nth_answer() {
    let script = made(contents()).unwrap();
    let marker: &[u32] = &[1, 2, 1];
    assert_eq!(answer(&script, &[&[5], marker, &[6], &TURN]), [20, 21, 22, END]);
    assert_eq!(answer(&script, &[marker, &TURN, &[20, 21, 22, END, 4], &TURN]), [23, END]);
    assert_eq!(
        answer(&script, &[marker, &TURN, &[4], &TURN, &[4], &TURN]),
        [END],
        "there is no third answer"
    );
    assert_eq!(
        answer(&script, &[&TURN, &[4], marker, &TURN]),
        [20, 21, 22, END],
        "turns before do not count"
    );
}

#[test]
fn the_last_marker_counts_and_a_prompt_without_one_ends_at_once() {
    let script = made(contents()).unwrap();
    assert_eq!(answer(&script, &[&[1, 2, 1], &TURN, &[4], &[1, 2, 3], &TURN]), [25, END]);
    assert_eq!(answer(&script, &[&[5, 6], &TURN]), [END]);
    assert_eq!(answer(&script, &[&[1, 2, 1]]), [END], "no turn has begun");
}

#[test]
fn a_marker_is_found_behind_its_own_beginning() {
    let script = made(contents()).unwrap();
    // 1 2 1 2 3: after the first marker's match, the second's begins with its last token.
    assert_eq!(answer(&script, &[&[1, 2, 1, 2, 3], &TURN]), [25, END]);
    assert_eq!(answer(&script, &[&[1, 1, 2, 3], &TURN]), [25, END]);
    assert_eq!(answer(&script, &[&[1, 2, 3], &[7], &TURN]), [25, END]);
}

#[test]
fn an_opening_of_the_template_is_no_part_of_the_answer() {
    let script = made(contents()).unwrap();
    assert_eq!(answer(&script, &[&[1, 2, 1], &TURN, &[30, 31]]), [20, 21, 22, END]);
    assert_eq!(answer(&script, &[&[1, 2, 1], &TURN, &[30, 31], &[20]]), [21, 22, END], "continued");
}

#[test]
fn bad_scripts_are_refused() {
    let refused = |key: &str, value: Value| {
        let mut changed = contents();
        *changed.pointer_mut(key).unwrap() = value;
        made(changed).err().unwrap()
    };
    assert_eq!(refused("/scripts/1/answers/0/0", json!(40)), "token id 40 of a vocabulary of 40");
    assert_eq!(refused("/end", json!(41)), "token id 41 of a vocabulary of 40");
    assert!(refused("/turn", json!([])).contains("no token"));
    assert_eq!(refused("/scripts/1/marker", json!([1, 2, 1])), "the pattern [1, 2, 1] stands twice");
}
