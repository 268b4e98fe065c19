//! Compares streamed text and its stop strings with a plain search of the whole text.

use std::sync::{Arc, LazyLock};

use tutti_proto::cluster::v1::{FinishReason, Finished, RequestEvent, SampledToken};

use crate::{
    generation::{
        Reason,
        fuzzing::{Choice, ChoiceSettings},
    },
    test_support,
    text::{
        detokenizer::Detokenizer,
        stop::{Progress, StopMatcher},
        tokenizer::{SpecialTokens, Tokenizer},
    },
};

/// The output of a model, and its division into events.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Stop strings; none is empty.
    pub stops: Vec<String>,
    /// Tokens of the output.
    pub ids: Vec<u32>,
    /// Number of tokens per event. The list is repeated as often as needed.
    pub events: Vec<u8>,
    /// Bits 0 and 1 select the tokenizer, bit 2 includes special tokens, and bit 3 includes the stop string.
    pub flags: u8,
}

/// Streams an output token by token. Asserts that the text equals the text of all tokens decoded at once, up to the
/// first stop string that a plain search finds.
pub fn stop_strings(outputs: &Outputs) {
    let Outputs { stops, ids, events, flags } = outputs;
    let tokenizer = tokenizer(*flags);
    let special = SpecialTokens::included(flags & 4 != 0);
    let Ok(whole) = tokenizer.decode(ids, special) else { return };
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), special);
    let mut streamed: String = ids.iter().map(|&id| detokenizer.push(id).text).collect();
    streamed.push_str(&detokenizer.flush());
    // See `text::detokenizer`: with byte fallback, the number of replacement characters may differ.
    if flags & 3 != 2 || !whole.contains('\u{fffd}') && !streamed.contains('\u{fffd}') {
        assert_eq!(streamed, whole, "the tokens {ids:?} stream as another text");
    }
    let stops: Arc<[String]> = stops.clone().into();
    let (expected, found) = search(&stops, &streamed);
    matcher(&stops, &streamed, events, (expected, found));
    let include_stop = flags & 8 != 0;
    let settings = ChoiceSettings {
        index: 0,
        detokenizer: Some(Detokenizer::new(tokenizer, special)),
        stops: stops.clone(),
        include_stop,
        min_tokens: 0,
        ending_tokens: [].into(),
        prompt_logprobs: None,
        parser: None,
        tools: Arc::default(),
    };
    let (text, tokens, reason) = stream(Choice::new(settings), ids, events);
    let stop = found.map(|index| stops[index].clone());
    let shown = stop.as_deref().filter(|_| include_stop).unwrap_or_default();
    assert_eq!(text, [expected, shown].concat());
    match stop {
        Some(stop) => assert_eq!(reason, Reason::StopString(stop)),
        None => assert_eq!((reason, &tokens), (Reason::Length, ids)),
    }
    assert!(ids.starts_with(&tokens), "the tokens are others: {tokens:?}");
}

fn tokenizer(flags: u8) -> Arc<Tokenizer> {
    static ALL: LazyLock<[Arc<Tokenizer>; 3]> = LazyLock::new(|| {
        let byte_fallback = test_support::byte_fallback_tokenizer();
        [test_support::tokenizer(), test_support::metaspace_tokenizer(), byte_fallback]
    });
    ALL[usize::from(flags & 3) % 3].clone()
}

/// The text before the stop string that ends first, and that string's index. If several stop strings end at the same
/// character, the longest one is taken.
fn search<'a>(stops: &[String], text: &'a str) -> (&'a str, Option<usize>) {
    for (at, c) in text.char_indices() {
        let end = at + c.len_utf8();
        let ending = |(_, stop): &(usize, &String)| text[..end].ends_with(stop.as_str());
        let found = stops.iter().enumerate().filter(ending).max_by_key(|(i, s)| (s.len(), usize::MAX - i));
        if let Some((index, stop)) = found {
            return (&text[..end - stop.len()], Some(index));
        }
    }
    (text, None)
}

/// Passes the text to a matcher in pieces of the given sizes in bytes. The pieces need not be whole tokens.
fn matcher(stops: &Arc<[String]>, text: &str, sizes: &[u8], expected: (&str, Option<usize>)) {
    let mut matcher = StopMatcher::new(stops.clone());
    let longest = stops.iter().map(String::len).max().unwrap_or(0);
    let (mut out, mut rest, mut pushed) = (String::new(), text, 0);
    for size in sizes.iter().cycle().take(text.len() + 1) {
        let (piece, after) = rest.split_at(rest.ceil_char_boundary(usize::from(*size).min(rest.len())));
        (rest, pushed) = (after, pushed + piece.len());
        match matcher.push(piece) {
            Progress::Text(text) => out.push_str(&text),
            Progress::Matched { before, stop } => {
                assert_eq!((&*(out + &before), Some(stop)), expected);
                return;
            }
        }
        assert!(pushed - out.len() < longest.max(1), "more is held back than a stop string has");
    }
    if rest.is_empty() {
        assert_eq!((&*(out + &matcher.flush()), None), expected);
    }
}

/// Passes the tokens to a choice, and returns its text, its tokens and its finish reason.
fn stream(mut choice: Choice, ids: &[u32], events: &[u8]) -> (String, Vec<u32>, Reason) {
    let (mut text, mut shown, mut at) = (String::new(), Vec::new(), 0);
    let mut sizes = events.iter().cycle();
    loop {
        let count = sizes.next().map_or(1, |size| usize::from(*size).max(1)).min(ids.len() - at);
        let tokens = ids[at..at + count].iter().zip(at as u32..);
        let tokens =
            tokens.map(|(&token_id, index)| SampledToken { token_id, index, logprob: None }).collect();
        at += count;
        let finished = (at == ids.len()).then(|| Finished {
            reason: FinishReason::Length.into(),
            generated: ids.len() as u32,
            ..Finished::default()
        });
        let event = RequestEvent { tokens, finished, ..RequestEvent::default() };
        let Some(delta) = choice.take(event).expect("a sound event") else { continue };
        text.push_str(&delta.text);
        shown.extend(delta.tokens.iter().map(|token| token.id));
        if let Some(finish) = delta.finish {
            return (text, shown, finish.reason);
        }
    }
}
