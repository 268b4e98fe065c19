//! A bounded place for CPU-bound work on text, so that long prompts neither block the async threads nor pile up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Semaphore;
use tutti_runtime::Error;

/// Runs closures on blocking threads: so many at once, so many more waiting, and an early refusal beyond that.
pub struct TextPool {
    running: Arc<Semaphore>,
    admitted: AtomicUsize,
    limit: usize,
}

/// Gives a place in the queue back, also when the waiting request goes away.
struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl TextPool {
    /// A pool of `threads` with room for `queue` waiting closures.
    pub fn new(threads: usize, queue: usize) -> Self {
        Self {
            running: Arc::new(Semaphore::new(threads)),
            admitted: AtomicUsize::new(0),
            limit: threads + queue,
        }
    }

    /// Runs `work`, or refuses it at once when the queue is full.
    pub async fn run<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let ahead = self.admitted.fetch_add(1, Ordering::Relaxed);
        let _place = Place(&self.admitted);
        if ahead >= self.limit {
            let message = format!("{ahead} texts are waiting to be tokenised, the limit is {}", self.limit);
            return Err(Error::overloaded(message, Duration::from_secs(1)));
        }
        let closed = |_| Error::internal("the tokenising pool is closed");
        let permit = self.running.clone().acquire_owned().await.map_err(closed)?;
        // The permit moves into the closure: a request that goes away does not make room for one more thread.
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        done.await.map_err(|e| Error::internal(format!("a text task failed: {e}")))
    }
}

#[cfg(test)]
mod tests {
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
}
