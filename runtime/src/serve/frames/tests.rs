use super::*;

fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
    let mut frame = (payload as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags, 0, 0, 0, 1]);
    frame.resize(HEADER + payload, 7);
    frame
}

/// A budget after the preface.
fn begun() -> FrameBudget {
    let mut budget = FrameBudget::new();
    assert!(budget.read(PREFACE));
    budget
}

#[test]
fn frames_are_counted_however_their_bytes_are_cut() {
    let stream =
        [frame(4, 0, 6), frame(HEADERS, 4, 40), frame(DATA, 0, 300), frame(2, 0, 5), frame(DATA, 1, 0)];
    let stream = stream.concat();
    for cut in 1..40 {
        let mut budget = begun();
        // The stream is read within one time stamp, so the budget does not grow.
        stream.chunks(cut).for_each(|piece| assert!(budget.read(piece)));
        let used = BURST - budget.left;
        assert!(
            used <= 2.0 && matches!(budget.position, Position::Header(_, 0)),
            "{used} in pieces of {cut}"
        );
    }
    let mut budget = begun();
    budget.left = 2.5;
    budget.since = Instant::now();
    assert!(budget.read(&stream) && budget.left < 1.0);
}

#[test]
fn a_flood_uses_up_the_budget_and_requests_do_not() {
    for (kind, payload) in [(2, 5), (8, 4), (6, 8), (4, 0), (0xbe, 0), (DATA, 0)] {
        let flood = frame(kind, 0, payload).repeat(1000);
        let mut budget = begun();
        let reads = (0..100).take_while(|_| budget.read(&flood)).count();
        assert!((20..60).contains(&reads), "{reads} reads of frames of type {kind}");
    }
    let mut budget = begun();
    let requests = [frame(HEADERS, 4, 40), frame(DATA, 0, 8000), frame(DATA, 1, 0)].concat().repeat(100);
    (0..1000).for_each(|_| assert!(budget.read(&requests)));
}

#[test]
fn a_reader_pays_for_its_updates_and_a_ping_does_not_pay_for_itself() {
    let mut budget = begun();
    // Some clients send two WINDOW_UPDATE frames per event.
    for _ in 0..1_000_000 {
        budget.written(100);
        assert!(budget.read(&frame(8, 0, 4).repeat(2)));
    }
    let mut budget = begun();
    let pings = frame(6, 0, 8).repeat(1000);
    let reads = (0..1000).take_while(|_| {
        budget.written(17 * 1000);
        budget.read(&pings)
    });
    assert!(reads.count() < 1000);
}

#[test]
fn http1_is_not_counted() {
    let mut budget = FrameBudget::new();
    assert!(budget.read(b"PRI"));
    assert!(budget.read(b"VATE / HTTP/1.1\r\n"));
    (0..100).for_each(|_| assert!(budget.read(&[0; 65536])));
}
