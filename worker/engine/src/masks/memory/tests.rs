use super::*;

#[test]
fn beyond_the_limit_only_a_large_matcher_fails() {
    let memory = MatcherMemory::start(100).unwrap();
    (0..4).for_each(|_| memory.enter());
    assert_eq!(memory.change(0, 20), Ok(()));
    assert_eq!(memory.change(0, 75), Ok(()), "below the limit, a matcher may take most of it");
    assert_eq!(memory.change(0, 25), Ok(()), "a small matcher goes on");
    assert_eq!(
        memory.change(75, 76),
        Err("its states take 76 bytes of 121 of all requests; the limit is 100".to_owned())
    );
    memory.leave(76, None);
    assert_eq!(memory.change(25, 40), Ok(()), "what a failed matcher had is free again");
}
