use std::time::Duration;

use super::*;

#[test]
fn work_that_panics_is_an_error() {
    let failed = on_stack(1 << 20, || -> u32 { panic!("expected by this test") });
    assert_eq!(failed.unwrap_err().to_string(), "cannot be compiled");
}

#[test]
fn the_matcher_that_works_is_stopped_when_the_time_is_over() {
    let canceller = Canceller::default();
    let deadline = Deadline::at(Instant::now() + Duration::from_millis(20));
    let stopped = deadline.run(1 << 20, || {
        deadline.watch(canceller.clone())?;
        while !canceller.is_cancelled() {
            std::thread::yield_now();
        }
        deadline.check()
    });
    assert_eq!(stopped.unwrap().unwrap_err().to_string(), "takes too long to compile");
}

#[test]
fn work_that_begins_too_late_is_not_begun() {
    let deadline = Deadline::at(Instant::now());
    assert!(deadline.watch(Canceller::default()).is_err());
}
