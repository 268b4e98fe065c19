use tokio::sync::oneshot;
use tutti_runtime::ErrorKind;

use super::*;

#[tokio::test]
async fn the_queue_is_bounded_and_recovers() {
    let pool = Arc::new(TextPool::new(1, 1).unwrap());
    let (started, has_started) = oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let first = tokio::spawn({
        let pool = pool.clone();
        async move {
            pool.run(Lane::Short, move || {
                started.send(()).unwrap();
                released.recv().unwrap();
            })
            .await
        }
    });
    has_started.await.unwrap();
    let mut second = Box::pin(pool.run(Lane::Short, || 2));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    let refused = pool.run(Lane::Short, || 3).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    release.send(()).unwrap();
    first.await.unwrap().unwrap();
    assert_eq!(second.await, Ok(2));
    assert_eq!(pool.run(Lane::Short, || 4).await, Ok(4));
}

#[tokio::test]
async fn no_lane_waits_for_another() {
    let pool = TextPool::new(1, 1).unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let mut long = Box::pin(pool.run(Lane::Long, move || released.recv().unwrap()));
    assert!(futures_util::poll!(long.as_mut()).is_pending());
    let mut waiting = Box::pin(pool.run(Lane::Long, || ()));
    assert!(futures_util::poll!(waiting.as_mut()).is_pending());
    for lane in [Lane::Parse, Lane::Short, Lane::Render] {
        assert_eq!(pool.run(lane, || 1).await, Ok(1));
    }
    assert_eq!(pool.run(Lane::Long, || ()).await.unwrap_err().kind(), ErrorKind::Overloaded);
    release.send(()).unwrap();
    long.await.unwrap();
    waiting.await.unwrap();
}
