use super::CurrentWait;

#[test]
fn a_wait_is_seen_while_it_lasts() {
    let wait = CurrentWait::new();
    assert!(wait.look().is_none());
    let (first, _) = wait.during(|| wait.look()).unwrap();
    assert!(wait.look().is_none());
    let (second, lasts) = wait.during(|| wait.look()).unwrap();
    assert!(second >= first && lasts <= wait.epoch.elapsed());
}
