use super::*;

fn address(number: u32) -> IpAddr {
    IpAddr::from(number.to_be_bytes())
}

#[test]
fn an_address_that_guesses_is_refused_until_its_tries_are_back() {
    let (wrong_keys, now) = (WrongKeys::default(), Instant::now());
    let guess = |then: Instant| {
        let refused = wrong_keys.refuse(address(1), 60, then);
        if refused.is_none() {
            wrong_keys.wrong(address(1), 60, then);
        }
        refused
    };
    assert_eq!((0..60).filter_map(|_| guess(now)).next(), None);
    let wait = guess(now).unwrap();
    assert!(wait <= Duration::from_secs(2), "{wait:?}");
    assert_eq!(wrong_keys.refuse(address(2), 60, now), None, "another address has its own tries");
    assert_eq!(guess(now + wait), None);
    assert!(guess(now + wait).is_some());
}

#[test]
fn a_right_key_protects_those_who_share_its_address() {
    let (wrong_keys, now) = (WrongKeys::default(), Instant::now());
    wrong_keys.right(address(1), now);
    (0..1000).for_each(|_| wrong_keys.wrong(address(1), 60, now));
    assert_eq!(wrong_keys.refuse(address(1), 60, now), None);
    assert_eq!(wrong_keys.refuse(address(1), 60, now + PROTECTED - Duration::from_millis(1)), None);
    assert!(wrong_keys.refuse(address(1), 60, now + PROTECTED).is_some());
}

#[test]
fn the_addresses_are_bounded_and_idle_ones_make_room() {
    let (wrong_keys, now) = (WrongKeys::default(), Instant::now());
    for number in 0..MAX_ADDRESSES as u32 + 10 {
        wrong_keys.wrong(address(number), 1, now);
    }
    assert_eq!(wrong_keys.0.lock().len(), MAX_ADDRESSES);
    let later = now + REFILLED;
    wrong_keys.wrong(address(u32::MAX), 1, later);
    assert_eq!(wrong_keys.0.lock().len(), 1);
    assert!(wrong_keys.refuse(address(u32::MAX), 1, later).is_some());
}
