//! Tests that the engine copies pages of divided requests and answers imports during a pause inside a step.

use std::{collections::VecDeque, sync::Arc};

use tutti_transfer::Event;

use super::{Answers, PAGE_BYTES, Side, arrived, decode, import, prefill, prefilled};
use crate::common::{expected, launch, settings};

#[test]
fn arrivals_during_a_step_are_taken_before_it_ends() {
    let (mut from, mut to, answers) = (Side::new(&settings()), Side::new(&settings()), Answers::default());
    let (other, whole) = (launch(1, 10, 60), launch(2, 18, 9));
    to.engine.launch(other.clone());
    to.engine.launch(decode(&whole));
    to.step();
    let (runs, exported) = prefilled(&mut from, &whole);
    let (connector, waker, answered) = (to.connector.clone(), to.engine.waker(), Arc::clone(&answers));
    let mut events: VecDeque<Event> = runs.into_iter().map(arrived).collect();
    events.push_back(import(2, exported, &answers));
    to.probe.lock().unwrap().during = Some(Box::new(move || {
        // One event arrives per step. The engine must have taken the event by the next pause. The last event is the
        // import of request 2.
        assert!(connector.lock().events.is_empty());
        connector.lock().events.extend(events.pop_front());
        waker.wake();
    }));
    let mut steps = 0;
    while answered.lock().unwrap().is_empty() {
        assert!(to.step() && steps < 20, "not answered after {steps} steps");
        steps += 1;
        // Request 2 is imported inside the step, so no step has computed a row of it yet.
        assert!(to.ids(2).is_empty());
    }
    assert_eq!(*answers.lock().unwrap(), [Ok(())]);
    to.probe.lock().unwrap().during = None;
    to.idle();
    assert_eq!(to.ids(1), expected(&other).output);
    assert_eq!(to.ids(2), expected(&whole).output[1..]);
}

#[test]
fn pages_that_could_not_leave_between_steps_leave_inside_the_next() {
    let mut side = Side::new(&settings());
    let (other, whole) = (launch(1, 10, 40), launch(2, 60, 5));
    side.engine.launch(other.clone());
    side.step();
    side.engine.launch(prefill(&whole));
    side.connector.lock().room = 0;
    // The connector has no room for the pages of this chunk, so request 2 is held back while request 1 decodes.
    side.step();
    side.step();
    assert_eq!(side.connector.lock().sent.len(), 0);
    let connector = side.connector.clone();
    side.probe.lock().unwrap().during = Some(Box::new(move || connector.lock().room = usize::MAX));
    side.step();
    let left = |side: &Side| {
        side.connector.lock().sent.iter().map(|(_, data)| data.len() / PAGE_BYTES).sum::<usize>()
    };
    assert!(left(&side) >= 3, "{} pages", left(&side));
    side.probe.lock().unwrap().during = None;
    side.idle();
    assert_eq!((left(&side), side.connector.lock().exported.len()), (15, 1));
    assert_eq!(side.ids(1), expected(&other).output);
}
