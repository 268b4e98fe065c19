use tutti_constraints::{Constraint, Environment, Kind, Vocabulary};

use super::*;
use crate::masks::testing;

fn matcher() -> tutti_constraints::Matcher {
    let vocabulary: Vocabulary = testing::bytes();
    let environment = Environment::new(&vocabulary).unwrap();
    environment.compile(&Constraint::new(Kind::Regex("a+".to_owned()))).unwrap()
}

#[test]
fn work_beyond_its_processor_time_is_stopped() {
    let watch = Watch::start().unwrap();
    let mut lane = watch.lane();
    let mut matcher = matcher();
    let watched = lane.watch(matcher.canceller());
    let until = Instant::now() + Duration::from_secs(60);
    let mut words = vec![0; matcher.mask_words()];
    while matcher.mask(&mut words).is_ok() {
        assert!(Instant::now() < until, "it was not stopped");
    }
    drop(watched);
    assert_eq!(matcher.mask(&mut words).unwrap_err().to_string(), "takes too long");
}

#[test]
fn a_thread_that_waits_uses_no_time() {
    let watch = Watch::start().unwrap();
    let mut lane = watch.lane();
    let mut matcher = matcher();
    let watched = lane.watch(matcher.canceller());
    thread::sleep(3 * MASK_TIME);
    drop(watched);
    assert!(matcher.mask(&mut vec![0; matcher.mask_words()]).is_ok());
}
