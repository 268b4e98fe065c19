use super::*;

const WALK: WalkId = WalkId(1);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns the bounds after bare steps with these numbers of tokens and durations in milliseconds. Each step is
/// repeated `MIN_STEPS` times, so that the bound uses its size.
fn after(steps: &[(usize, u64)]) -> LeastTime {
    let mut least = LeastTime::default();
    for &(tokens, took) in steps {
        (0..MIN_STEPS).for_each(|_| least.record(WALK, tokens, true, ms(took)));
    }
    least
}

#[test]
fn nothing_is_known_until_a_few_steps_have_shown_it() {
    let mut least = LeastTime::default();
    for _ in 1..MIN_STEPS {
        least.record(WALK, 100, true, ms(10));
        assert_eq!(least.of(WALK, 1000, 100), Duration::ZERO);
    }
    least.record(WALK, 100, true, ms(10));
    assert_eq!(least.of(WALK, 1000, 100), ms(100) / MARGIN);
}

#[test]
fn a_prompt_takes_as_many_steps_as_the_budget_makes_of_it() {
    let least = after(&[(64, 8), (16, 4)]);
    assert_eq!(least.of(WALK, 200, 64), ms(3 * 8) / MARGIN, "and nothing is known of 8 tokens");
    assert_eq!(least.of(WALK, 216, 64), ms(3 * 8 + 4) / MARGIN);
    assert_eq!(
        least.of(WALK, 200, usize::MAX),
        ms(8) / MARGIN,
        "in one step it may cost no more than 64 tokens"
    );
    assert_eq!((least.of(WALK, 0, 64), least.of(WALK, 15, 64)), (Duration::ZERO, Duration::ZERO));
}

#[test]
fn steps_with_other_work_can_lower_the_bound_but_not_raise_it() {
    let mut least = after(&[(64, 8)]);
    least.record(WALK, 64, false, ms(80));
    assert_eq!(least.of(WALK, 64, 64), ms(8) / MARGIN);
    least.record(WALK, 70, false, ms(6));
    assert_eq!(least.of(WALK, 64, 64), ms(6) / MARGIN);
    least.record(WALK, 32, false, ms(1));
    assert_eq!(least.of(WALK, 64, 64), ms(6) / MARGIN, "fewer tokens may take less");
}

#[test]
fn a_step_that_was_slow_once_is_no_bound() {
    let mut least = after(&[(64, 800)]);
    least.record(WALK, 64, true, ms(8));
    assert_eq!(least.of(WALK, 64, 64), ms(8) / MARGIN);
    // Every step of 16 tokens was slow, but a step of more tokens was fast.
    let mut least = after(&[(16, 800)]);
    least.record(WALK, 64, true, ms(8));
    assert_eq!(least.of(WALK, 16, 64), ms(8) / MARGIN);
}

#[test]
fn each_walk_has_its_own_bound() {
    let least = after(&[(64, 8)]);
    assert_eq!(least.of(WalkId(0), 64, 64), Duration::ZERO);
    assert_eq!((least.of_any(64, 64), LeastTime::default().of_any(64, 64)), (ms(8) / MARGIN, Duration::ZERO));
}
