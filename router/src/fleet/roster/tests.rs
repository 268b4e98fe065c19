use std::time::Duration;

use tutti_runtime::prefix_index::Holder;

use super::*;
use crate::fleet::{Access, FleetSettings, address, member::Timeouts};

fn member(name: &str) -> Option<Member> {
    let channel = address::connection(name, &Access::insecure(), &FleetSettings::default()).ok()?;
    let timeouts = Timeouts { answer: Duration::from_secs(1), accept: Duration::from_secs(1) };
    Some(Member::new(name.to_owned(), channel, timeouts, Holder(0)))
}

fn names(members: &[Arc<Member>]) -> Vec<&str> {
    members.iter().map(|member| member.name.as_str()).collect()
}

#[tokio::test]
async fn members_come_and_go_with_the_name_and_the_fixed_ones_stay() {
    let (a, b, c) = ("http://a:1", "http://b:1", "http://c:1");
    let mut roster = Roster::fixed(vec![Arc::new(member(a).unwrap())]);
    let set = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    let change = roster.update(&set(&[a, b]), member);
    assert_eq!((names(&change.joined), names(roster.members())), (vec![b], vec![a, b]));
    let first_b = roster.members()[1].clone();
    let change = roster.update(&set(&[c]), member);
    assert_eq!((names(&change.left), names(roster.members())), (vec![b], vec![a, c]));
    assert!(first_b.is_removed() && !roster.members()[0].is_removed());
    // A conductor that joins again is a new member, without its earlier history.
    roster.update(&set(&[b, c]), member);
    assert!(!roster.members().iter().any(|member| Arc::ptr_eq(member, &first_b)));
    assert_eq!(names(roster.members()), [a, c, b]);
}
