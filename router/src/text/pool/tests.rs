use tokio::sync::oneshot;
use tutti_runtime::ErrorKind;

use super::*;

#[tokio::test]
async fn the_queue_is_bounded_and_recovers() {
    let pool = Arc::new(TextPool::new(1, 1));
    let (started, has_started) = oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let first = tokio::spawn({
        let pool = pool.clone();
        async move {
            pool.run(move || {
                started.send(()).unwrap();
                released.recv().unwrap();
            })
            .await
        }
    });
    has_started.await.unwrap();
    let mut second = Box::pin(pool.run(|| 2));
    assert!(futures_util::poll!(second.as_mut()).is_pending());
    let refused = pool.run(|| 3).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    release.send(()).unwrap();
    first.await.unwrap().unwrap();
    assert_eq!(second.await, Ok(2));
    assert_eq!(pool.run(|| 4).await, Ok(4));
}
