use super::*;

#[test]
fn an_address_that_others_reach_needs_keys() {
    let given = ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "0.0.0.0:1", "[::]:1", "10.0.0.1:1"];
    let addresses: Vec<SocketAddr> = given.iter().map(|address| address.parse().unwrap()).collect();
    assert_eq!(open(&addresses, false).collect::<Vec<_>>(), addresses[3..].iter().collect::<Vec<_>>());
    assert_eq!(open(&addresses, true).count(), 0);
}
