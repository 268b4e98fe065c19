use http::Version;

use super::*;
use crate::serve::{activity::Claim, standing::Standing};

fn table(max_open: u32, max_per_peer: u32) -> Arc<OpenConnections> {
    OpenConnections::new(ConnectionSettings { max_open, max_per_peer, ..ConnectionSettings::default() })
}

fn peer(last: u8) -> Peer {
    Peer::Ip(IpAddr::from([10, 0, 0, last]))
}

/// Enters a connection of this peer, and returns its activity with its entry.
fn enter(open: &Arc<OpenConnections>, peer: Peer) -> Option<(Arc<Activity>, Entry)> {
    let activity = Activity::new();
    let entry = open.enter(peer, &activity)?;
    Some((activity, entry))
}

#[tokio::test]
async fn the_longest_idle_connection_makes_room_and_a_busy_one_does_not() {
    let open = table(3, 3);
    let (first, _first) = enter(&open, peer(1)).unwrap();
    let _busy = first.begin(Version::HTTP_11);
    let (second, _second) = enter(&open, peer(2)).unwrap();
    let (third, _third) = enter(&open, peer(3)).unwrap();
    let (fourth, _fourth) = enter(&open, peer(4)).unwrap();
    second.evicted().await;
    let _busy = [third.begin(Version::HTTP_11), fourth.begin(Version::HTTP_11)];
    assert!(enter(&open, peer(5)).is_none(), "three busy connections are open, and three is the limit");
    drop(_fourth);
    assert!(enter(&open, peer(5)).is_some());
}

#[tokio::test]
async fn one_peer_has_its_own_limit_and_makes_room_for_itself() {
    let open = table(8, 2);
    let (other, _other) = enter(&open, peer(9)).unwrap();
    let (first, _first) = enter(&open, peer(1)).unwrap();
    let (second, _second) = enter(&open, peer(1)).unwrap();
    let (third, _third) = enter(&open, peer(1)).unwrap();
    first.evicted().await;
    let _busy = [second.begin(Version::HTTP_2), third.begin(Version::HTTP_2)];
    assert!(enter(&open, peer(1)).is_none());
    assert!(enter(&open, peer(2)).is_some());
    assert!(enter(&open, Peer::Local).is_some());
    assert!(matches!(other.claim(Duration::ZERO), Some(Claim::Idle(_))));
}

#[tokio::test]
async fn requests_of_strangers_make_room_after_a_while_and_those_of_known_callers_do_not() {
    let open = table(2, 2);
    let (known, _known) = enter(&open, peer(1)).unwrap();
    let (strange, _strange) = enter(&open, peer(2)).unwrap();
    let (served, held) = (known.begin(Version::HTTP_2), strange.begin(Version::HTTP_2));
    let mut extensions = http::Extensions::new();
    extensions.insert(served.standing.clone());
    Standing::vouch(&extensions);
    Standing::vouch(&extensions);
    assert!(enter(&open, peer(3)).is_none(), "a probe that has just begun is answered");
    drop((_known, _strange));
    let open = Arc::new(OpenConnections { strangers_time: Duration::ZERO, ..Arc::into_inner(open).unwrap() });
    let _entries = [&known, &strange].map(|activity| open.enter(peer(1), activity).unwrap());
    let (_, _third) = enter(&open, peer(3)).unwrap();
    strange.evicted().await;
    drop((served, held));
    assert!(matches!(known.claim(Duration::ZERO), Some(Claim::Idle(_))));
}

#[test]
fn a_host_with_a_whole_ipv6_network_is_one_peer() {
    let of = |text: &str| network(Peer::Ip(text.parse().unwrap()));
    assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::7"));
    assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
    assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
    assert_ne!(of("10.0.0.2"), of("10.0.0.1"));
}
