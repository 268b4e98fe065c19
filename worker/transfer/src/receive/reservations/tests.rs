use tonic::Code;

use super::*;

fn key(request: u64) -> GraphKey {
    pb::GraphKey { request, incarnation: 0, graph: 1 }.into()
}

fn message(request: u64) -> pb::PlaneReservation {
    pb::PlaneReservation { secret: vec![request as u8; 16], lease_ms: 1000 }
}

fn expect(reservations: &Reservations, request: u64) {
    reservations.expect(key(request), &message(request));
}

fn space(count: usize) -> Space {
    Space { layout: UnitLayout::of_embeddings(8), share: None, count, known: 0, segment: None }
}

/// The answer to a sender that shows a secret.
fn code(reservations: &Reservations, request: u64, secret: u8) -> Option<Code> {
    let call = credential::push((), key(request), &[secret; 16]);
    let checked = reservations.check(key(request), call.metadata().as_ref());
    checked.and_then(|()| reservations.find(key(request)).map(drop)).err().map(|status| status.code())
}

#[test]
fn a_sender_finds_a_reservation_by_its_secret_once_pages_are_held() {
    let reservations = Reservations::default();
    expect(&reservations, 1);
    let find = |secret: u8| code(&reservations, 1, secret);
    assert_eq!(find(1), Some(Code::NotFound), "no pages are held");
    assert!(!reservations.renew(key(1)));
    assert_eq!(reservations.hold(key(1), space(3)), Some(message(1)));
    assert_eq!((find(1), find(2)), (None, Some(Code::Unauthenticated)));
    assert!(reservations.renew(key(1)));
    reservations.end(key(1));
    assert_eq!(find(1), Some(Code::NotFound));
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
    assert_eq!(code(&reservations, 0, 0), Some(Code::NotFound));
    let found = reservations.find(key(1)).ok();
    assert!(matches!(found, Some(Found::Imported(pb::HandOver { computed_tokens: 1, .. }))));
    assert_eq!(code(&reservations, 1, 9), Some(Code::Unauthenticated));
}
