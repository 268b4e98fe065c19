use http::Extensions;

use super::*;
use crate::serve::activity::Activity;

fn caller(last: u8, is_known: bool) -> Caller {
    let standing = Standing::of_stranger(Activity::new());
    let mut extensions = Extensions::new();
    extensions.insert(standing.clone());
    if is_known {
        Standing::vouch(&extensions);
    }
    Caller::new(Peer::Ip(IpAddr::from([10, 0, 0, last])), standing)
}

/// Takes one byte at a time until there is no room. Returns the number of bytes and the error's message.
fn fill(room: &Room, caller: &Caller) -> (usize, String) {
    let mut taken = Taken::default();
    loop {
        if let Err(error) = room.take(caller, &mut taken, 1) {
            assert_eq!(error.kind(), ErrorKind::Overloaded);
            return (taken.known + taken.strange, error.message().to_owned());
        }
    }
}

#[test]
fn strangers_have_a_part_and_no_address_has_all_of_it() {
    let room = Room::new(1600, false);
    for address in 1..=4 {
        assert_eq!(fill(&room, &caller(address, false)).0, 100);
    }
    let (bytes, message) = fill(&room, &caller(5, false));
    assert_eq!((bytes, message.contains("without a credential")), (0, true), "{message}");
    // Strangers have taken all of their part. Known callers of the same address can still take their whole share.
    let (bytes, message) = fill(&room, &caller(1, true));
    assert_eq!((bytes, message.contains("from one address")), (800, true), "{message}");
    assert_eq!(fill(&room, &caller(6, true)).0, 400);
}

#[test]
fn trusted_callers_have_no_bound_and_strangers_keep_theirs() {
    let room = Room::new(1600, true);
    let (mut taken, known) = (Taken::default(), caller(1, true));
    room.take(&known, &mut taken, 1 << 40).unwrap();
    assert_eq!(fill(&room, &caller(1, false)).0, 100);
    room.give_back(&known, &mut taken);
    assert_eq!(room.held(), 100);
}

#[test]
fn a_message_gives_back_what_it_took_although_its_sender_became_known_meanwhile() {
    let (room, stranger) = (Room::new(1600, false), caller(1, false));
    let mut taken = Taken::default();
    room.take(&stranger, &mut taken, 50).unwrap();
    let mut extensions = Extensions::new();
    extensions.insert(stranger.standing.clone());
    Standing::vouch(&extensions);
    room.take(&stranger, &mut taken, 500).unwrap();
    assert_eq!(room.held(), 550);
    room.give_back(&stranger, &mut taken);
    assert_eq!(room.held(), 0);
    assert!(room.known.held.lock().by_peer.is_empty() && room.strangers.held.lock().by_peer.is_empty());
}
