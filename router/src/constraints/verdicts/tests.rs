use super::*;

fn key(n: usize) -> Arc<[u8]> {
    vec![n as u8; 100].into()
}

fn error(message: &str) -> ConstraintError {
    let cause = tutti_constraints::Cause::Constraint;
    ConstraintError { path: "schema".into(), message: message.into(), cause }
}

#[test]
fn a_result_is_kept_while_it_is_used_and_the_size_is_bounded() {
    let verdicts = Verdicts::new(10_000);
    verdicts.keep(key(0), Err(error("is empty")));
    for n in 1..200 {
        verdicts.keep(key(n), Ok(()));
        assert_eq!(verdicts.get(&key(0)), Some(Err(error("is empty"))));
        assert!(verdicts.bytes() <= 10_000, "{n}: {} bytes", verdicts.bytes());
    }
    assert_eq!((verdicts.get(&key(1)), verdicts.get(&key(199))), (None, Some(Ok(()))));
}

#[test]
fn an_entry_larger_than_the_cache_is_not_kept_and_drops_no_other() {
    let verdicts = Verdicts::new(1000);
    verdicts.keep(key(1), Ok(()));
    verdicts.keep(vec![1; 5000].into(), Ok(()));
    assert_eq!(verdicts.get(&key(1)), Some(Ok(())));
    assert!(verdicts.bytes() <= 1000);
}

#[test]
fn an_error_of_time_is_not_kept() {
    let verdicts = Verdicts::new(10_000);
    verdicts.keep(key(0), Err(error("takes too long to compile")));
    assert_eq!(verdicts.get(&key(0)), None);
}
