//! Tests of divided requests with state in slots.

use tutti_engine::EngineSettings;
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::ErrorKind;
use tutti_settings::Admission;
use tutti_transfer::{Event, HandOver, Run, UnitKind};

use super::{Answers, Side, arrived, carry, decode, import, key, prefill_behind, prefilled};
use crate::common::{RequestResults, Stateful, launch, settings, token_bits, with_logprobs};

fn results(side: &Side, request: u64) -> RequestResults {
    side.tokens.get(&request).into_iter().flatten().map(token_bits).collect()
}

#[test]
fn divided_requests_give_the_results_of_a_request_alone() {
    for model in Stateful::ALL {
        let page = model.page_tokens();
        // Requests grow on the decoding side, which preempts some of them. A preempted request computes its prompt
        // again there, in a slot that held other state.
        let launches: Vec<_> = (0..24)
            .map(|request: usize| {
                let (prompt, output) = (1 + request * 7 % (3 * page), 2 + request % (3 * page));
                let mut launch = with_logprobs(launch(request as u64, prompt, output as u32));
                if request.is_multiple_of(3) {
                    let shared = (0..2 * page as u32 + 1).map(|token| token * 3);
                    launch.spec.as_mut().unwrap().prompt.splice(0..0, shared);
                }
                launch
            })
            .collect();
        let alone = model.alone(&launches).results;
        let tight = EngineSettings { admission: Admission::Optimistic, ..settings() };
        let (mut from, mut to) =
            (Side::of(model.engine(&settings(), 129)), Side::of(model.engine(&tight, 13)));
        let answers = Answers::default();
        launches.iter().for_each(|launch| to.engine.launch(decode(launch)));
        let mut spared = 0;
        for turn in 0.. {
            assert!(turn < 20_000, "{model:?}: {} ended, {:?} {:?}", to.outcomes.len(), from.load, to.load);
            for (key, _, known) in to.connector.lock().reserved.drain(..) {
                spared += known;
                from.engine.launch(prefill_behind(&launches[key.request.0 as usize], known));
            }
            let (a, b) = (from.step(), to.step());
            for request in carry(&from, &to, &answers) {
                from.give(Event::Accepted(key(request, 0)));
            }
            if !a && !b && to.outcomes.len() == launches.len() {
                break;
            }
        }
        for launch in &launches {
            let request = launch.key.unwrap().request;
            let whole = [results(&from, request), results(&to, request)].concat();
            assert!(whole == alone[&request], "{model:?}, request {request}");
            assert!(matches!(to.outcomes[&request], pb::completion::Outcome::Finished(_)));
        }
        assert!(answers.lock().unwrap().iter().all(Result::is_ok));
        for load in [&from.load, &to.load] {
            assert_eq!((load.kv_pages_used, load.slots_used), (0, 0));
        }
        assert!(from.load.cached_tokens > 0, "{model:?}: some prefixes were found, not computed");
        assert!(spared > 0, "{model:?}: some pages were known, not sent");
        assert!(to.load.preemptions > 0, "{model:?}: the pool is large enough for all");

        // The pages that came from the other side have no snapshot, so the cached prefix must not end at one of them.
        let mut again = launches[21].clone();
        again.key.as_mut().unwrap().request = 100;
        to.engine.launch(again);
        to.idle();
        assert!(results(&to, 100) == alone[&21], "{model:?}");
    }
}

#[test]
fn a_slot_that_is_missing_or_of_another_size_is_refused() {
    for model in Stateful::ALL {
        let engine = || model.engine(&settings(), 65);
        let (mut from, mut to, answers) = (Side::of(engine()), Side::of(engine()), Answers::default());
        let whole = with_logprobs(launch(1, 2 * model.page_tokens() + 1, 9));
        let alone = model.alone(std::slice::from_ref(&whole)).results;
        to.engine.launch(decode(&whole));
        to.idle();
        let (runs, exported) = prefilled(&mut from, &whole);
        let (slots, pages): (Vec<_>, Vec<_>) =
            runs.into_iter().partition(|(run, _)| run.kind == UnitKind::Slot);
        let [(slot, state)] = &slots[..] else { panic!("{} slots", slots.len()) };
        assert_eq!((exported.slots, slot.key), (1, key(1, 1)));
        pages.into_iter().for_each(|run| to.give(arrived(run)));
        let refused = |to: &mut Side, hand_over: HandOver, why: &str| {
            to.give(import(1, hand_over, &answers));
            to.idle();
            let error = answers.lock().unwrap().pop().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().contains(why), "{error}");
        };
        let missing = format!("the slot is missing, with the planes {}", model.planes());
        refused(&mut to, exported, &missing);
        let shorter = state[1..].to_vec();
        for data in [vec![], shorter, [&state[..], &[0]].concat(), state.repeat(2)] {
            to.give(arrived((*slot, data)));
            refused(&mut to, exported, &missing);
        }
        to.give(arrived((Run { key: key(7, 1), ..*slot }, state.clone())));
        refused(&mut to, exported, &missing);
        to.give(arrived((*slot, state.clone())));
        let none = format!("0 slots are handed over, but 1 are wanted ({})", model.planes());
        refused(&mut to, HandOver { slots: 0, ..exported }, &none);
        assert_eq!((to.ids(1), to.load.running), (vec![], 0), "no step has had a row of it");

        to.give(import(1, exported, &answers));
        to.step();
        to.step();
        // A slot that arrives after the import changes nothing.
        to.give(arrived((*slot, vec![9; state.len()])));
        to.idle();
        assert_eq!(*answers.lock().unwrap(), [Ok(())]);
        assert!([results(&from, 1), results(&to, 1)].concat() == alone[&1], "{model:?}");
        assert_eq!((to.load.kv_pages_used, to.load.slots_used), (0, 0));
    }
}
