use super::*;

const SIZE: LaneSize = LaneSize { threads: 1, queue: 4, quantum: 1 };

#[cfg(target_os = "linux")]
#[tokio::test]
async fn threads_in_the_background_yield_to_all_others() {
    let nice = || rustix::process::getpriority_process(None).unwrap();
    let usual = nice();
    let background = WorkLane::in_background(SIZE, "test").unwrap();
    assert_eq!(background.run(Share::default(), 1, nice).await.unwrap(), BACKGROUND_NICE.max(usual));
    assert_eq!(WorkLane::new(SIZE).run(Share::default(), 1, nice).await.unwrap(), usual);
    assert_eq!(nice(), usual);
}

#[tokio::test]
async fn a_panic_fails_its_closure_alone() {
    for lane in [WorkLane::new(SIZE), WorkLane::in_background(SIZE, "test").unwrap()] {
        let failed = lane.run(Share::default(), 1, || panic!("of a closure")).await;
        assert!(matches!(failed, Err(NotRun::Failed(_))), "{failed:?}");
        assert_eq!(lane.run(Share::default(), 1, || 7).await.unwrap(), 7);
    }
}
