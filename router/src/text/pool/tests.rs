use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tutti_runtime::ErrorKind;

use super::*;

fn work(lane: Lane) -> TextWork {
    TextWork { lane, share: Share::WITHOUT_KEY, bytes: 1 }
}

#[tokio::test]
async fn the_queue_is_bounded_and_recovers() {
    let pool = Arc::new(TextPool::new(1, 1).unwrap());
    let (started, has_started) = oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let first = tokio::spawn({
        let pool = pool.clone();
        async move {
            pool.run(work(Lane::Short), move || {
                started.send(()).unwrap();
                released.recv().unwrap();
            })
            .await
        }
    });
    has_started.await.unwrap();
    let mut second = Box::pin(pool.run(work(Lane::Short), || 2));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    let refused = pool.run(work(Lane::Short), || 3).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    release.send(()).unwrap();
    first.await.unwrap().unwrap();
    assert_eq!(second.await, Ok(2));
    assert_eq!(pool.run(work(Lane::Short), || 4).await, Ok(4));
}

#[tokio::test]
async fn no_lane_waits_for_another() {
    let pool = TextPool::new(1, 1).unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let mut long = Box::pin(pool.run(work(Lane::Long), move || released.recv().unwrap()));
    assert!(futures_util::poll!(long.as_mut()).is_pending());
    let mut waiting = Box::pin(pool.run(work(Lane::Long), || ()));
    assert!(futures_util::poll!(waiting.as_mut()).is_pending());
    for lane in [Lane::Parse, Lane::Short, Lane::Render] {
        assert_eq!(pool.run(work(lane), || 1).await, Ok(1));
    }
    assert_eq!(pool.run(work(Lane::Long), || ()).await.unwrap_err().kind(), ErrorKind::Overloaded);
    release.send(()).unwrap();
    long.await.unwrap();
    waiting.await.unwrap();
}

#[tokio::test]
async fn a_flood_of_texts_of_one_key_delays_another_by_one_turn() {
    let pool = TextPool::new(1, 600).unwrap();
    let of = |key: &str| TextWork { lane: Lane::Short, share: Share::of_key(key), bytes: 10_000 };
    let (release, released) = std::sync::mpsc::channel::<()>();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut first = Box::pin(pool.run(of("flood"), move || released.recv().unwrap()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let note = |key: &'static str| {
        let order = order.clone();
        pool.run(of(key), move || order.lock().push(key))
    };
    let mut waiting: Vec<_> = (0..400).map(|_| Box::pin(note("flood"))).collect();
    for text in &mut waiting {
        assert!(futures_util::poll!(text.as_mut()).is_pending());
    }
    let mut one = Box::pin(note("one"));
    assert!(futures_util::poll!(one.as_mut()).is_pending());
    // A caller that cancels passes its turn on.
    drop(waiting.remove(0));
    release.send(()).unwrap();
    // Each future runs its own text when it has its turn, so all futures are polled.
    let (first, one, flood) = tokio::join!(first, one, join_all(waiting));
    assert!(first.is_ok() && one.is_ok() && flood.iter().all(Result::is_ok));
    let order = order.lock();
    assert!(order.iter().position(|key| *key == "one").is_some_and(|ahead| ahead <= 2), "{order:?}");
    assert_eq!(order.len(), 400);
}

#[tokio::test]
async fn a_flood_of_one_key_leaves_places_for_others() {
    let pool = TextPool::new(1, 99).unwrap();
    let of = |key: &str| TextWork { lane: Lane::Short, share: Share::of_key(key), bytes: 1 };
    let (release, released) = std::sync::mpsc::channel::<()>();
    let mut first = Box::pin(pool.run(of("flood"), move || released.recv().unwrap()));
    assert!(futures_util::poll!(first.as_mut()).is_pending());
    let mut waiting: Vec<_> = (0..74).map(|_| Box::pin(pool.run(of("flood"), || ()))).collect();
    for text in &mut waiting {
        assert!(futures_util::poll!(text.as_mut()).is_pending());
    }
    assert_eq!(pool.run(of("flood"), || ()).await.unwrap_err().kind(), ErrorKind::Overloaded);
    let mut one = Box::pin(pool.run(of("one"), || 1));
    assert!(futures_util::poll!(one.as_mut()).is_pending());
    release.send(()).unwrap();
    let (first, one, flood) = tokio::join!(first, one, join_all(waiting));
    assert!(first.is_ok() && one == Ok(1) && flood.iter().all(Result::is_ok));
}
