use proptest::prelude::*;

use super::*;
use crate::{test_support, text::tokenizer::SpecialTokens};

const END: u32 = 261;
/// A stop token whose text is `c`.
const STOP: u32 = 99;

fn choice(stops: &[String], min_tokens: u32) -> Choice {
    Choice::new(ChoiceSettings {
        index: 0,
        detokenizer: Some(Detokenizer::new(test_support::tokenizer(), SpecialTokens::Exclude)),
        stops: stops.into(),
        include_stop: false,
        min_tokens,
        ending_tokens: [STOP, END].into(),
        prompt_logprobs: None,
        parser: None,
        tools: Arc::default(),
    })
}

/// The event that carries `finished`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    WithLastTokens,
    InOwnEvent,
}

/// Feeds `ids` to the choice, in events with `sizes` tokens each. Returns the concatenation of all deltas, and the
/// deltas.
fn play(choice: &mut Choice, ids: &[u32], sizes: &[usize], ending: Ending) -> (Delta, Vec<Delta>) {
    let reason = match ids.last() {
        Some(&END) => FinishReason::EndOfSequence,
        Some(&STOP) => FinishReason::StopToken,
        _ => FinishReason::Length,
    };
    let generated = ids.len() as u32;
    let finished =
        Finished { reason: reason.into(), generated, stop_token_id: Some(STOP), ..Finished::default() };
    let mut tokens =
        ids.iter().zip(0..).map(|(&token_id, index)| SampledToken { token_id, index, logprob: None });
    let mut events: Vec<RequestEvent> = sizes
        .iter()
        .chain([&ids.len()])
        .map(|&size| RequestEvent { tokens: tokens.by_ref().take(size).collect(), ..RequestEvent::default() })
        .collect();
    if ending == Ending::InOwnEvent {
        events.push(RequestEvent::default());
    }
    events.last_mut().unwrap().finished = Some(finished);
    let (mut whole, mut deltas) = (Delta::default(), Vec::new());
    for event in events {
        let Some(delta) = choice.take(event).unwrap() else { continue };
        deltas.push(delta.clone());
        whole.text.push_str(&delta.text);
        whole.tokens.extend(delta.tokens);
        whole.finish = delta.finish;
        if whole.finish.is_some() {
            break;
        }
    }
    (whole, deltas)
}

#[test]
fn a_stop_string_may_begin_in_the_minimum_of_tokens() {
    let ids = [97, 98, 97, 98];
    let text = |stop: &str, min_tokens| {
        play(&mut choice(&[stop.to_owned()], min_tokens), &ids, &[1; 4], Ending::WithLastTokens).0.text
    };
    assert_eq!(
        (text("ab", 0), text("ab", 1), text("ab", 2), text("ba", 2)),
        ("".into(), "".into(), "ab".into(), "a".into())
    );
}

proptest! {
    #[test]
    fn the_cut_into_events_changes_nothing(
        ids in prop::collection::vec(prop_oneof![97u32..100, Just(195), Just(169), Just(258), Just(END)], 1..20),
        stops in prop::collection::vec("[a-cé]{1,3}", 0..3),
        min_tokens in 0u32..6,
        sizes in prop::collection::vec(0usize..4, 0..20),
        ending in prop_oneof![Just(Ending::WithLastTokens), Just(Ending::InOwnEvent)],
    ) {
        let one_by_one = vec![1; ids.len()];
        let (expected, _) = play(&mut choice(&stops, min_tokens), &ids, &one_by_one, Ending::WithLastTokens);
        let (got, deltas) = play(&mut choice(&stops, min_tokens), &ids, &sizes, ending);
        prop_assert_eq!(&got, &expected);
        prop_assert_eq!(got.tokens.len() as u32, got.finish.unwrap().generated);
        let firsts = deltas.iter().filter(|delta| delta.first).count();
        prop_assert_eq!((firsts, deltas[0].first), (1, true));
    }
}
