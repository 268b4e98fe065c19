use super::*;

const LAUNCH: &[FaultKind] = crate::launch::LAUNCH_FAULTS;

#[test]
fn a_rule_counts_only_what_meets_its_conditions() {
    let plan = FaultPlan::parse("fail kernel=argmax at=2 device=1").unwrap();
    assert_eq!(plan.next(LAUNCH, 1, "argmax"), None);
    assert_eq!(plan.next(LAUNCH, 0, "argmax"), None, "another device");
    assert_eq!(plan.next(LAUNCH, 1, "rope"), None, "another kernel");
    assert_eq!(plan.next(&[FaultKind::OutOfMemory], 1, "argmax"), None, "another kind of event");
    assert_eq!(plan.next(LAUNCH, 1, "argmax"), Some(FaultKind::Fail));
    assert_eq!(plan.next(LAUNCH, 1, "argmax"), None, "a rule acts once");
}

#[test]
fn a_rule_with_a_file_waits_for_it_and_takes_it_away() {
    let file = std::env::temp_dir().join(format!("tutti-fault-{}", std::process::id()));
    let plan = FaultPlan::parse(&format!("hang when={}", file.display())).unwrap();
    assert_eq!(plan.next(LAUNCH, 0, "rope"), None);
    std::fs::write(&file, "").unwrap();
    assert_eq!(plan.next(LAUNCH, 0, "rope"), Some(FaultKind::Hang));
    assert!(!file.exists());
    assert_eq!(plan.next(LAUNCH, 0, "rope"), None);
}

#[test]
fn what_is_not_understood_is_named() {
    assert!(FaultPlan::parse("explode").unwrap_err().contains("explode"));
    assert!(FaultPlan::parse("fail at=soon").unwrap_err().contains("soon"));
    assert!(FaultPlan::parse("fail never").unwrap_err().contains("never"));
    assert!(FaultPlan::parse("fail rank=1").unwrap_err().contains("rank"));
    assert!(FaultPlan::parse(" ; ").is_ok());
}
