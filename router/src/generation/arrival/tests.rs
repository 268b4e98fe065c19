use super::*;

#[test]
fn the_share_of_checks_without_a_key_is_that_of_the_address() {
    let of = |address: &str| {
        let mut extensions = Extensions::new();
        extensions.insert(Peer::Ip(address.parse().unwrap()));
        Arrival::of(&HeaderMap::new(), &extensions).share_of_checks
    };
    assert_eq!(of("10.0.0.1"), of("10.0.0.1"));
    assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    // One host often has a whole network of IPv6.
    assert_eq!(of("2001:db8::1"), of("2001:db8::2"));
    assert!(of("10.0.0.1").is_of_key(), "a flood of one address leaves room for others");
    let unknown = Arrival::of(&HeaderMap::new(), &Extensions::new());
    assert_eq!(unknown.share_of_checks, Share::WITHOUT_KEY);
}
