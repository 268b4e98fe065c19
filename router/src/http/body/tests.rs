use axum::body::Body;

use super::*;

#[tokio::test]
async fn bodies_share_the_memory_limit_and_give_it_back() {
    let reader = BodyReader::new(PIECE_BYTES);
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
async fn a_body_that_stops_arriving_is_refused() {
    let silent = Body::from_stream(futures_util::stream::pending::<Result<Bytes, std::io::Error>>());
    let reader = BodyReader { patience: Duration::from_millis(1), ..BodyReader::new(PIECE_BYTES) };
    let refused = reader.read(Request::new(silent)).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
}
