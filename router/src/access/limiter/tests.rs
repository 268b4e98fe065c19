use super::*;

#[test]
fn a_flood_of_one_kind_is_bounded_and_counted_and_hides_no_other() {
    let (limiter, start) = (Limiter::default(), Instant::now());
    let refused = |now| limiter.count(Status::Http(401), "refused", now);
    assert_eq!((0..1000).filter_map(|_| refused(start)).collect::<Vec<_>>(), vec![0; LINES as usize]);
    assert_eq!(limiter.count(Status::Http(500), "failed", start), Some(0));
    assert_eq!(limiter.count(Status::Grpc(tonic::Code::Unauthenticated), "refused", start), Some(0));
    // A client that leaves hides no stream that failed.
    assert_eq!(limiter.count(Status::Http(401), "failed", start), Some(0));
    assert_eq!(refused(start + WINDOW), Some(1000 - LINES));
    assert_eq!(refused(start + WINDOW), Some(0));
}
