use super::*;

const PACE: Pace =
    Pace { patience: Duration::from_secs(10), whole: Duration::from_secs(60), bytes_per_second: 100 };

fn peer(last: u8) -> Option<IpAddr> {
    Some(IpAddr::from([10, 0, 0, last]))
}

#[test]
fn room_is_taken_as_bytes_arrive_and_given_back() {
    let uploads = Uploads::new(2 * PIECE_BYTES, || PACE);
    // Bodies that have begun and have sent no bytes take no memory.
    let idle: Vec<_> = (0..1000).map(|_| uploads.begin(None)).collect();
    let mut full: Vec<_> = (0..LARGEST_AT_ONCE).map(|_| uploads.begin(None)).collect();
    for upload in &mut full {
        upload.take(2 * PIECE_BYTES).unwrap();
    }
    let mut next = uploads.begin(None);
    assert_eq!(next.take(1).unwrap_err().kind(), ErrorKind::Overloaded);
    full.pop();
    for _ in 0..2 * PIECE_BYTES {
        next.take(1).unwrap();
    }
    assert_eq!(next.take(1).unwrap_err().kind(), ErrorKind::TooLarge);
    drop((idle, full, next));
    assert_eq!(uploads.room.memory.available_permits(), 2 * LARGEST_AT_ONCE);
}

#[test]
fn a_peer_takes_its_share_and_leaves_the_rest() {
    let uploads = Uploads::new(PIECE_BYTES, || PACE);
    let mut mine: Vec<_> = (0..=LARGEST_PER_PEER).map(|_| uploads.begin(peer(1))).collect();
    let taken: Vec<_> = mine.iter_mut().map(|upload| upload.take(PIECE_BYTES)).collect();
    assert!(taken[..LARGEST_PER_PEER].iter().all(Result::is_ok));
    assert_eq!(taken[LARGEST_PER_PEER].clone().unwrap_err().kind(), ErrorKind::RateLimited);
    uploads.begin(peer(2)).take(PIECE_BYTES).unwrap();
    mine.remove(0);
    uploads.begin(peer(1)).take(PIECE_BYTES).unwrap();
    drop(mine);
    assert!(uploads.room.peers.lock().is_empty());
}

#[test]
fn all_addresses_of_an_ipv6_network_are_one_peer() {
    let parse = |text: &str| Peer::network(text.parse().unwrap());
    assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:0:0:2"));
    assert_ne!(parse("2001:db8::1"), parse("2001:db8:0:1::1"));
    assert_eq!(parse("::ffff:10.0.0.1"), IpAddr::from([10, 0, 0, 1]));
}

#[test]
fn a_body_is_due_by_its_bytes_and_at_the_latest_by_the_whole_time() {
    let uploads = Uploads::new(1 << 20, || PACE);
    let mut upload = uploads.begin(None);
    let start = upload.started;
    assert_eq!(upload.due() - start, Duration::from_secs(10));
    upload.take(500).unwrap();
    assert_eq!(upload.due() - start, Duration::from_secs(15));
    upload.take(100_000).unwrap();
    assert_eq!(upload.due() - start, Duration::from_secs(60));
}
