use std::time::Duration;

use futures_util::stream;
use http_body::Body as _;
use tutti_runtime::{Error, ErrorKind};

use super::*;
use crate::uploads::{LARGEST_AT_ONCE, PIECE_BYTES, Pace};

fn uploads() -> Uploads {
    let pace =
        Pace { patience: Duration::from_millis(20), whole: Duration::from_secs(60), bytes_per_second: 1000 };
    Uploads::new(PIECE_BYTES, pace)
}

fn metered(uploads: &Uploads, body: axum::body::Body) -> MeteredBody {
    MeteredBody { inner: Body::new(body), upload: Arc::new(Mutex::new(uploads.begin(None))), due: None }
}

async fn next(body: &mut MeteredBody) -> Option<Result<Frame<Bytes>, Status>> {
    std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

#[tokio::test]
async fn messages_share_the_room_of_bodies() {
    let uploads = uploads();
    let whole = || axum::body::Body::from(vec![0; PIECE_BYTES]);
    let mut held: Vec<_> = (0..=LARGEST_AT_ONCE).map(|_| metered(&uploads, whole())).collect();
    let (last, first) = held.split_last_mut().unwrap();
    for body in first {
        assert!(next(body).await.unwrap().is_ok());
    }
    let refused = Error::from(next(last).await.unwrap().unwrap_err());
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
}

#[tokio::test]
async fn a_message_that_stops_arriving_ends_its_call() {
    let first = stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(b"x"))]);
    let body = axum::body::Body::from_stream(futures_util::StreamExt::chain(first, stream::pending()));
    let mut body = metered(&uploads(), body);
    assert!(next(&mut body).await.unwrap().is_ok());
    let refused = Error::from(next(&mut body).await.unwrap().unwrap_err());
    assert!(refused.message().contains("too slowly"), "{refused}");
}
