//! Any division of an output into pieces gives the same events.

use proptest::{prelude::*, sample::select};
use tutti_formats::{Answer, Event};

use crate::{
    samples::SAMPLES,
    support::{WORD, answer, dialect, events, request, tokens},
};

/// Events with the texts of one kind joined, across pieces.
fn joined(events: Vec<Event>) -> Vec<Event> {
    let mut joined: Vec<Event> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(Event::Reasoning(text)), Event::Reasoning(more)) => text.push_str(&more),
            (Some(Event::Content(text)), Event::Content(more)) => text.push_str(&more),
            (
                Some(Event::Arguments { json_fragment: text, index }),
                Event::Arguments { json_fragment: more, index: same },
            ) => {
                assert_eq!(*index, same);
                text.push_str(&more);
            }
            (_, event) => joined.push(event),
        }
    }
    joined
}

/// Divides the texts of ordinary tokens behind the characters whose number is in `cuts`.
fn divided(tokens: &[(u32, String)], cuts: &dyn Fn(usize) -> bool) -> Vec<(u32, String)> {
    let mut pieces = Vec::new();
    let mut number = 0;
    for (id, text) in tokens {
        if *id != WORD {
            pieces.push((*id, text.clone()));
            continue;
        }
        let mut piece = String::new();
        for character in text.chars() {
            piece.push(character);
            number += 1;
            if cuts(number) {
                pieces.push((WORD, std::mem::take(&mut piece)));
            }
        }
        pieces.push((WORD, piece));
    }
    pieces
}

fn check(format: &str, reasoning: &str, markers: &[&str], output: &str, cuts: &dyn Fn(usize) -> bool) {
    let dialect = dialect(format, reasoning, markers);
    let whole = tokens(output, markers);
    let expected = joined(events(dialect.parser(request()), &whole));
    let streamed = joined(events(dialect.parser(request()), &divided(&whole, cuts)));
    assert_eq!(streamed, expected, "{format}: {output}");
    let sum = |events: Vec<Event>| {
        let mut answer = Answer::default();
        answer.extend(events);
        answer
    };
    assert_eq!(sum(streamed), sum(expected));
}

#[test]
fn one_character_at_a_time_gives_the_same_events() {
    for sample in SAMPLES {
        check(sample.format, sample.reasoning, &[], sample.output, &|_| true);
        check(sample.format, sample.reasoning, sample.markers, sample.output, &|_| true);
    }
}

#[test]
fn a_cut_at_any_character_gives_the_same_events() {
    for sample in SAMPLES {
        for cut in 1..sample.output.chars().count() {
            check(sample.format, sample.reasoning, &[], sample.output, &|number| number == cut);
        }
    }
}

#[test]
fn an_output_that_ends_anywhere_gives_the_same_events() {
    for sample in SAMPLES {
        for (end, _) in sample.output.char_indices() {
            check(sample.format, sample.reasoning, &[], &sample.output[..end], &|_| true);
        }
    }
}

/// A text that exceeds a bound breaks its call at the same byte, wherever it stands and however it arrives.
#[test]
fn a_text_beyond_a_bound_gives_the_same_events() {
    for sample in SAMPLES {
        for (length, step, cut) in [(1_500, 5, 1), (70_000, 37, 999)] {
            let long: String = "xü<".chars().cycle().take(length).collect();
            for (at, _) in sample.output.char_indices().step_by(step) {
                let (before, behind) = sample.output.split_at(at);
                let output = format!("{before}{long}{behind}");
                check(sample.format, sample.reasoning, &[], &output, &|number| number % cut == 0);
            }
        }
    }
}

/// Pieces of outputs, right and wrong: markers, names, JSON, text.
fn fragments() -> Vec<&'static str> {
    let others = [
        "\n",
        " ",
        "{",
        "}",
        "\"",
        "<",
        "[",
        "x",
        "ü",
        "{\"name\": \"now\"",
        ", \"arguments\": {\"a\": 1}}",
        "weather",
        "name=\"weather\">",
        "```",
        ":",
        "]",
        ",",
        ";",
        "(",
        ")",
        "=",
        "\\",
        "0",
    ];
    let markers = SAMPLES.iter().flat_map(|sample| sample.markers).copied();
    let tags = [
        "<function=",
        "weather>",
        "<parameter=",
        "days>",
        "</parameter>",
        "</function>",
        "<invoke ",
        "<parameter ",
        "</invoke>",
        "<｜DSML｜invoke ",
        "<｜DSML｜parameter ",
        "string=\"false\">",
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "functions.now:0",
        "to=functions.now",
        "[now(",
        "a=",
    ];
    others.into_iter().chain(markers).chain(tags).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_text_in_any_pieces_gives_the_same_events(
        fragments in prop::collection::vec(select(fragments()), 0..40),
        cuts in prop::collection::vec(any::<bool>(), 64),
        sample in 0..SAMPLES.len(),
        are_tokens in any::<bool>(),
    ) {
        let sample = &SAMPLES[sample];
        let markers = if are_tokens { sample.markers } else { &[] };
        let output = fragments.concat();
        check(sample.format, sample.reasoning, markers, &output, &|number| cuts[number % cuts.len()]);
    }

    #[test]
    fn without_calls_all_is_content(
        fragments in prop::collection::vec(select(fragments()), 0..12),
        cuts in prop::collection::vec(any::<bool>(), 64),
        format in select(vec!["hermes", "qwen_xml", "glm", "llama3_json", "pythonic", "mistral"]),
    ) {
        let output = fragments.concat();
        let pieces = divided(&tokens(&output, &[]), &|number| cuts[number % cuts.len()]);
        let answer = answer(dialect(format, "none", &[]).parser(request()), &pieces);
        if answer.calls.is_empty() {
            prop_assert_eq!(answer.content, output);
        }
    }

    #[test]
    fn a_sample_with_a_wrong_piece_gives_the_same_events(
        fragment in select(fragments()),
        at in any::<prop::sample::Index>(),
        removed in 0_usize..30,
        cuts in prop::collection::vec(any::<bool>(), 64),
        sample in 0..SAMPLES.len(),
    ) {
        let sample = &SAMPLES[sample];
        let mut characters: Vec<char> = sample.output.chars().collect();
        let at = at.index(characters.len());
        let end = (at + removed).min(characters.len());
        characters.splice(at..end, fragment.chars());
        let output: String = characters.into_iter().collect();
        check(sample.format, sample.reasoning, &[], &output, &|number| cuts[number % cuts.len()]);
    }
}
