use std::net::Ipv4Addr;

use super::*;
use crate::serve::{activity::Activity, standing::Standing, stream::Peer};

/// A message of `length` bytes with its prefix.
fn message(length: u32) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.extend(length.to_be_bytes());
    bytes.resize(PREFIX + length as usize, 7);
    bytes
}

#[test]
fn messages_end_where_their_prefixes_say_however_they_are_cut() {
    let stream = [message(3), message(0), message(300)].concat();
    for cut in 1..20 {
        let mut framing = Framing::default();
        let mut ends = Vec::new();
        for (index, piece) in stream.chunks(cut).enumerate() {
            framing.read(piece);
            let read = (index * cut + piece.len()).min(stream.len());
            let expected = [8, 13, 318].iter().filter(|end| **end <= read).count() as u64;
            assert_eq!(framing.messages, expected, "after {read} bytes in pieces of {cut}");
            if framing.is_whole() {
                ends.push(read);
            }
        }
        assert_eq!(ends.last(), Some(&stream.len()));
        assert!(ends.iter().all(|end| [8, 13, 318].contains(end)));
    }
}

#[tokio::test]
async fn bytes_take_room_as_they_arrive_and_leave_it_with_the_message() {
    // Known callers of one address have half of the room.
    let receiving = Arc::new(Receiving::new(Room::new(200, false), Duration::from_secs(60)));
    let body = |bytes: Vec<u8>| {
        let standing = Standing::of_stranger(Activity::new());
        let mut extensions = http::Extensions::new();
        extensions.insert(standing.clone());
        Standing::vouch(&extensions);
        let caller = Caller::new(Peer::Ip(Ipv4Addr::LOCALHOST.into()), standing);
        ReceivedBody::new(axum::body::Body::from(bytes), receiving.clone(), caller)
    };
    async fn frame(
        body: &mut (impl http_body::Body<Error = BoxError> + Unpin),
    ) -> Option<Result<(), BoxError>> {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        frame.map(|frame| frame.map(drop))
    }
    // Two partial messages each need most of the room, so the second one fails.
    let mut partial = body(message(1000)[..60].to_vec());
    frame(&mut partial).await.unwrap().unwrap();
    let error = frame(&mut body(message(1000)[..60].to_vec())).await.unwrap().unwrap_err();
    let status = error.downcast::<Status>().unwrap();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert_eq!(receiving.room.held(), 60);
    drop(partial);
    // A complete message leaves the room when the next frame is requested.
    let mut whole = body(message(60));
    frame(&mut whole).await.unwrap().unwrap();
    assert_eq!(receiving.room.held(), 65);
    assert!(frame(&mut whole).await.is_none());
    assert_eq!(receiving.room.held(), 0);
}
