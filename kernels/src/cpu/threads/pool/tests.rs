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
fn a_thread_prepares_once_before_its_first_task() {
    for threads in [1, 3] {
        let mut pool = ThreadPool::new(threads).unwrap();
        for tasks in [0, 1, 2, 3, 17].repeat(200) {
            let prepared: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            let ran: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            let prepare = |thread: usize| {
                assert_eq!(ran[thread].load(Ordering::Relaxed), 0);
                prepared[thread].fetch_add(1, Ordering::Relaxed);
            };
            pool.run_prepared(tasks, prepare, |_, thread| {
                assert_eq!(prepared[thread].load(Ordering::Relaxed), 1);
                ran[thread].fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
            let ran: Vec<usize> = ran.into_iter().map(AtomicUsize::into_inner).collect();
            assert_eq!(ran.iter().sum::<usize>(), tasks);
            // A thread prepares once if it runs a task, and otherwise not at all.
            for (ran, prepared) in ran.into_iter().zip(prepared) {
                assert_eq!(prepared.into_inner(), usize::from(ran > 0));
            }
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
