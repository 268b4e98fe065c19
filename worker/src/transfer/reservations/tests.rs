use super::*;

fn key(request: u64) -> GraphKey {
    pb::GraphKey { request, incarnation: 0, graph: 1 }.into()
}

fn expect(reservations: &Reservations, request: u64) {
    let message = pb::PlaneReservation { secret: vec![request as u8; 16], lease_ms: 1000 };
    reservations.expect(key(request), &message);
}

fn space(count: usize) -> ReservedSpace {
    ReservedSpace { freight: Freight::of_embeddings(8), share: None, count, known: 0, segment: None }
}

#[test]
fn a_sender_finds_a_reservation_by_its_secret_once_pages_are_held() {
    let reservations = Reservations::default();
    expect(&reservations, 1);
    let find = |secret: u8| reservations.find(key(1), &[secret; 16]).err();
    assert_eq!(find(1), Some(NotFound::NoSuchGraph), "no pages are held");
    assert!(!reservations.renew(key(1)));
    assert_eq!(reservations.hold(key(1), space(3)), Some(vec![1; 16]));
    assert_eq!((find(1), find(2)), (None, Some(NotFound::WrongSecret)));
    assert!(reservations.renew(key(1)));
    reservations.end(key(1));
    assert_eq!(find(1), Some(NotFound::NoSuchGraph));
    assert!(!reservations.renew(key(1)) && reservations.lease_until(key(1)).is_none());
}

#[test]
fn accepted_hand_overs_are_remembered_up_to_a_limit() {
    let reservations = Reservations::default();
    for request in 0..MAX_REMEMBERED as u64 + 1 {
        expect(&reservations, request);
        reservations.hold(key(request), space(1));
        let hand_over = pb::HandOver { computed_tokens: request as u32, ..Default::default() };
        reservations.accept(key(request), hand_over);
        reservations.end(key(request));
    }
    assert_eq!(reservations.find(key(0), &[0; 16]).err(), Some(NotFound::NoSuchGraph));
    let found = reservations.find(key(1), &[1; 16]).ok();
    assert!(matches!(found, Some(Found::Imported(pb::HandOver { computed_tokens: 1, .. }))));
    assert_eq!(reservations.find(key(1), &[9; 16]).err(), Some(NotFound::WrongSecret));
}
