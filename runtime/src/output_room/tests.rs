use super::*;
use crate::metrics::Metrics;

/// A room, and its metrics as text.
fn room(limit: usize) -> (OutputRoom, Metrics) {
    let metrics = Metrics::default();
    (OutputRoom::new(limit, metrics.register(OutputRoomMetrics::register)), metrics)
}

/// A part that notes its end.
fn part(room: &OutputRoom) -> (HeldOutput, Arc<Mutex<Option<Error>>>) {
    let ended = Arc::new(Mutex::new(None));
    let note = ended.clone();
    (room.enter(move |error| *note.lock() = Some(error)), ended)
}

#[test]
fn the_largest_part_ends_when_the_room_is_full_and_no_other() {
    let (room, metrics) = room(100);
    let parts: Vec<_> = [20, 50, 30].map(|bytes| (bytes, part(&room))).into();
    for (bytes, (held, _)) in &parts {
        held.add(*bytes);
    }
    assert!(parts.iter().all(|(_, (held, _))| !held.is_ended()));
    // The request whose output comes now is not the one that ends.
    parts[0].1.0.add(1);
    let ended: Vec<bool> = parts.iter().map(|(_, (_, ended))| ended.lock().is_some()).collect();
    assert_eq!(ended, [false, true, false]);
    let error = parts[1].1.1.lock().clone().unwrap();
    assert!(error.kind() == ErrorKind::TooSlow && error.message().contains("100 bytes"), "{error}");
    let text = metrics.encode();
    assert!(text.contains("tutti_unread_output_bytes 51\n"), "{text}");
    assert!(text.contains("tutti_unread_output_ended_total 1\n"), "{text}");
    // Output that an ended request still adds or removes does not count.
    parts[1].1.0.add(70);
    parts[1].1.0.remove(70);
    parts[0].1.0.add(49);
    assert!(!parts[0].1.0.is_ended() && !parts[2].1.0.is_ended());
}

#[test]
fn room_that_is_given_back_is_free() {
    let (room, metrics) = room(100);
    let (slow, _) = part(&room);
    let (fast, _) = part(&room);
    slow.add(60);
    for _ in 0..10 {
        fast.add(40);
        fast.remove(40);
    }
    drop(slow);
    fast.add(100);
    assert!(!fast.is_ended());
    drop(fast);
    assert!(metrics.encode().contains("tutti_unread_output_bytes 0\n"));
    assert!(room.0.parts.lock().is_empty());
}

#[test]
fn a_request_that_is_larger_than_the_room_ends_itself() {
    let (room, _) = room(100);
    let ((other, _), (large, ended)) = (part(&room), part(&room));
    other.add(100);
    large.add(101);
    assert!(large.is_ended() && ended.lock().is_some() && !other.is_ended());
}
