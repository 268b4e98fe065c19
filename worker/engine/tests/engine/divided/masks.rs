//! Tests of output that follows a constraint, of requests that one engine prefills and another decodes.

use tutti_engine::EngineSettings;
use tutti_proto::cluster::v1::{self as pb, completion::Outcome};
use tutti_transfer::Event;

use super::{Answers, Side, carry, decode, key, prefill_behind};
use crate::common::{InFlight, any_request, constrained_engine, right, settings};

fn side(settings: &EngineSettings, in_flight: InFlight) -> Side {
    Side::of(constrained_engine(settings, in_flight))
}

#[test]
fn divided_requests_follow_their_constraints() {
    for in_flight in InFlight::ALL {
        let (mut from, mut to, answers) =
            (side(&settings(), in_flight), side(&settings(), in_flight), Answers::default());
        let launches: Vec<_> = (0..30).map(any_request).collect();
        launches.iter().for_each(|launch| to.engine.launch(decode(launch)));
        let ended = |from: &Side, to: &Side| {
            let ended = |request: &u64| {
                let at_prefill = from.outcomes.get(request);
                let at_prefill = at_prefill.is_some_and(|outcome| matches!(outcome, Outcome::Finished(_)));
                at_prefill || to.outcomes.contains_key(request)
            };
            (0..30).filter(ended).count()
        };
        while ended(&from, &to) < launches.len() {
            for (key, _, known) in to.connector.lock().reserved.drain(..) {
                from.engine.launch(prefill_behind(&launches[key.request.0 as usize], known));
            }
            let (a, b) = (from.step(), to.step());
            for request in carry(&from, &to, &answers) {
                from.give(Event::Accepted(key(request, 0)));
            }
            // A refused import would be waited for in vain.
            assert!(answers.lock().unwrap().iter().all(Result::is_ok), "{in_flight:?}: {answers:?}");
            if !a && !b {
                // The masks are made on other threads.
                std::thread::yield_now();
            }
        }
        for launch in &launches {
            let request = launch.key.unwrap().request;
            let whole = [from.ids(request), to.ids(request)].concat();
            assert_eq!(whole, right(launch).output, "{in_flight:?}: request {request}");
        }
        let masks = |load: &pb::WorkerLoad| load.masks.unwrap();
        assert!(masks(&from.load).compilations == 4 && masks(&to.load).compilations == 4);
        assert_eq!(masks(&from.load).masks, 0, "a prefill needs the first mask alone");
    }
}
