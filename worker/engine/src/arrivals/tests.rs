use tutti_proto::cluster::v1 as pb;

use super::*;

fn key(request: u64) -> GraphKey {
    pb::GraphKey { request, ..Default::default() }.into()
}

#[test]
fn the_oldest_waiting_request_counts() {
    let mut arrivals = Arrivals::default();
    arrivals.add(key(1));
    arrivals.add(key(2));
    assert!(arrivals.oldest() > Duration::ZERO);
    arrivals.remove(key(1));
    assert!(arrivals.oldest() > Duration::ZERO);
    arrivals.remove(key(2));
    assert_eq!(arrivals.oldest(), Duration::ZERO);
}

#[test]
fn a_long_wait_does_not_grow_the_queue() {
    let mut arrivals = Arrivals::default();
    arrivals.add(key(0));
    for request in 1..10_000 {
        arrivals.add(key(request));
        arrivals.remove(key(request));
    }
    assert!(arrivals.queue.len() <= SLACK + 4, "{}", arrivals.queue.len());
}
