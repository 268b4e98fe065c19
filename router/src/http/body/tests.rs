use std::time::Duration;

use axum::body::Body;
use tutti_runtime::ErrorKind;

use super::*;
use crate::uploads::{LARGEST_AT_ONCE, PIECE_BYTES, Pace};

fn reader(limit: usize, whole: Duration) -> BodyReader {
    let pace = Pace { patience: Duration::from_millis(50), whole, bytes_per_second: 100 };
    BodyReader::new(Uploads::new(limit, move || pace))
}

#[tokio::test]
async fn bodies_share_the_memory_limit_and_give_it_back() {
    let reader = reader(PIECE_BYTES, Duration::from_secs(60));
    let body = || Request::new(Body::from(vec![b' '; PIECE_BYTES]));
    let mut held = Vec::new();
    for _ in 0..LARGEST_AT_ONCE {
        held.push(reader.read(body()).await.ok().unwrap());
    }
    let refused = reader.read(body()).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    held.pop();
    assert_eq!(reader.read(body()).await.ok().unwrap().bytes.len(), PIECE_BYTES);
}

#[tokio::test]
async fn slow_bodies_leave_room_for_others() {
    let reader = reader(PIECE_BYTES, Duration::from_secs(60));
    // A request that declares the largest body and sends nothing.
    let silent = || {
        let body = Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
        Request::post("/").header(header::CONTENT_LENGTH, PIECE_BYTES).body(body).unwrap()
    };
    let mut slow: Vec<_> = (0..4 * LARGEST_AT_ONCE).map(|_| Box::pin(reader.read(silent()))).collect();
    for read in &mut slow {
        assert!(futures_util::poll!(read.as_mut()).is_pending());
    }
    let good = reader.read(Request::new(Body::from(vec![b' '; PIECE_BYTES]))).await;
    assert_eq!(good.ok().unwrap().bytes.len(), PIECE_BYTES);
    for read in slow {
        assert_eq!(read.await.err().unwrap().kind(), ErrorKind::TooSlow);
    }
}

/// A body of single bytes, one every `interval`.
fn drip(interval: Duration) -> Request {
    let drops = futures_util::stream::unfold((), move |()| async move {
        tokio::time::sleep(interval).await;
        Some((Ok::<_, std::io::Error>(Bytes::from_static(b" ")), ()))
    });
    Request::new(Body::from_stream(drops))
}

#[tokio::test]
async fn a_body_that_drips_is_refused_though_it_never_stops() {
    // Fifty bytes per second arrive, but the minimum rate is a hundred.
    let refused = reader(PIECE_BYTES, Duration::from_secs(600)).read(drip(Duration::from_millis(20))).await;
    let error = refused.err().unwrap();
    assert!(
        error.kind() == ErrorKind::TooSlow && error.message().contains("100 bytes per second"),
        "{error}"
    );
}

#[tokio::test]
async fn a_body_at_the_least_rate_ends_with_the_whole_time() {
    let reader = reader(1 << 20, Duration::from_millis(300));
    // Each piece extends the deadline by far more time than the piece takes to arrive.
    let pieces = futures_util::stream::unfold((), |()| async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        Some((Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 1000])), ()))
    });
    let refused = reader.read(Request::new(Body::from_stream(pieces))).await;
    assert!(refused.err().unwrap().message().contains("too slowly"));
}
