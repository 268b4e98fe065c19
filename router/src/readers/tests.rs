use std::sync::atomic::AtomicUsize;

use futures_util::{poll, stream};
use tutti_runtime::ErrorKind;

use super::*;

fn readers(patience_ms: u32, unread: usize) -> Readers {
    let settings = RouterSettings {
        reader_timeout_ms: patience_ms,
        reader_bytes_per_second: 1,
        max_unread_bytes: unread,
        ..RouterSettings::default()
    };
    Readers::new(&settings, &Metrics::default())
}

/// Counts the streams that are not dropped.
struct Alive(Arc<AtomicUsize>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// An endless stream of empty items, counted in `alive`.
fn endless(alive: &Arc<AtomicUsize>) -> Pin<Box<dyn Stream<Item = Result<(), &'static str>> + Send>> {
    alive.fetch_add(1, Relaxed);
    let counted = Alive(alive.clone());
    Box::pin(stream::repeat_with(move || {
        let _ = &counted;
        Ok(())
    }))
}

async fn until_dropped(alive: &AtomicUsize) {
    let dropped = async {
        while alive.load(Relaxed) > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), dropped).await.unwrap();
}

#[tokio::test]
async fn a_reader_that_takes_nothing_loses_its_stream() {
    let (readers, alive) = (readers(20, 1), Arc::default());
    let mut watched = readers.watch(endless(&alive), |_| 0, || Err("lost"));
    assert_eq!(watched.next().await, Some(Ok(())));
    // The server does not poll again. The stream is dropped nevertheless.
    until_dropped(&alive).await;
    assert_eq!((watched.next().await, watched.next().await), (Some(Err("lost")), None));
    assert_eq!(readers.shared.metrics.lost.get(), 1);
}

#[tokio::test]
async fn a_stream_without_items_does_not_wait_for_its_reader() {
    let readers = readers(8, 1);
    let alive = Arc::default();
    let mut idle = readers.watch(stream::pending::<()>().boxed(), |_| 0, || ());
    assert!(poll!(idle.next()).is_pending());
    // Each round lasts until another stream is lost. A stream that waited for its reader would be lost as well.
    for _ in 0..2 {
        let mut other = readers.watch(endless(&alive), |_| 0, || Err("lost"));
        other.next().await;
        until_dropped(&alive).await;
    }
    assert!(poll!(idle.next()).is_pending());
}

#[tokio::test]
async fn a_stream_that_wakes_its_server_in_vain_waits_for_its_reader() {
    let (readers, alive) = (readers(20, 1), Arc::default());
    let counted: Arc<AtomicUsize> = alive;
    let (items, mut received) = tokio::sync::mpsc::channel::<()>(1);
    counted.fetch_add(1, Relaxed);
    let guard = Alive(counted.clone());
    let stream = stream::poll_fn(move |context| {
        let _ = &guard;
        received.poll_recv(context).map(|item| item.map(Ok))
    });
    let mut watched = readers.watch(stream, |_| 0, || Err("lost"));
    assert!(poll!(watched.next()).is_pending());
    // The item wakes the server, but the server does not poll, because its connection has no room.
    items.send(()).await.unwrap();
    until_dropped(&counted).await;
    assert_eq!(watched.next().await, Some(Err("lost")));
}

#[tokio::test]
async fn a_slow_reader_has_the_time_that_its_bytes_earn() {
    let readers = readers(8, 1);
    let alive = Arc::default();
    // At one byte per second, this item of 3600 bytes earns its reader an hour.
    let mut slow = readers.watch(stream::repeat(3600usize).boxed(), |bytes| *bytes, || 0);
    slow.next().await;
    let mut other = readers.watch(endless(&alive), |_| 0, || Err("lost"));
    other.next().await;
    until_dropped(&alive).await;
    assert_eq!(slow.next().await, Some(3600));
}

#[tokio::test]
async fn the_inspection_ends_with_the_last_stream_and_begins_again() {
    let (readers, alive) = (readers(8, 1), Arc::default());
    for _ in 0..2 {
        drop(readers.watch(endless(&alive), |_| 0, || Err("lost")));
        let ended = async {
            while readers.shared.watched.lock().inspecting {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(60), ended).await.unwrap();
    }
}

#[tokio::test]
async fn large_answers_share_a_bound_in_bytes() {
    let readers = readers(20, 4 * PIECE_BYTES);
    // An estimate over the limit reserves all of the memory. The part that the answer does not need is released.
    let first = readers.room(usize::MAX).await.unwrap().hold(vec![b'x'; 3 * PIECE_BYTES]);
    let second = readers.room(PIECE_BYTES).await.unwrap().hold(vec![b'y'; PIECE_BYTES]);
    assert_eq!(readers.room(1).await.err().unwrap().kind(), ErrorKind::Overloaded);
    // As long as a slice of an answer exists, all of the answer's memory stays reserved.
    let part = second.slice(..1);
    drop(second);
    assert!(readers.room(1).await.is_err());
    drop(part);
    assert!(readers.room(1).await.is_ok());
    assert_eq!(first.len(), 3 * PIECE_BYTES);
}
