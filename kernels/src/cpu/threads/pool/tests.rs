use super::*;

#[test]
fn every_task_runs_exactly_once_however_often_it_is_asked() {
    for threads in [1, 2, 5] {
        let mut pool = ThreadPool::new(threads).unwrap();
        for round in 0..2_000 {
            let tasks = round % 17;
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, |index, thread| {
                assert!(thread < threads);
                counts[index].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn an_idle_thread_takes_tasks_of_the_others() {
    let mut pool = ThreadPool::new(3).unwrap();
    let done = AtomicUsize::new(0);
    pool.run(9, |index, _| {
        // The first task of the first share ends after all other tasks, including those of its own share.
        let began = Instant::now();
        while index == 0 && done.load(Ordering::SeqCst) < 8 {
            assert!(began.elapsed() < Duration::from_secs(60), "the other threads do not take the tasks");
            std::thread::yield_now();
        }
        done.fetch_add(1, Ordering::SeqCst);
    })
    .unwrap();
    assert_eq!(done.into_inner(), 9);
}

#[test]
fn a_parked_helper_is_woken() {
    let mut pool = ThreadPool::new(2).unwrap();
    let asleep = Arc::clone(&pool.helpers[0].asleep);
    for _ in 0..3 {
        while !asleep.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        // Each task waits for the other, so they end only if two threads run them.
        let met = AtomicUsize::new(0);
        pool.run(2, |_, _| {
            met.fetch_add(1, Ordering::SeqCst);
            while met.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        })
        .unwrap();
    }
}

#[test]
fn a_panicking_task_is_an_error_and_the_pool_goes_on() {
    for threads in [1, 3] {
        let mut pool = ThreadPool::new(threads).unwrap();
        let error = pool.run(8, |index, _| assert_ne!(index, 5, "boom")).unwrap_err();
        assert!(matches!(error, DeviceError::Lost(_)), "{error}");
        pool.run(8, |_, _| {}).unwrap();
    }
}
