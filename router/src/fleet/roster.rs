//! Who belongs to the fleet: conductors given by URL for good, and those that a name leads to at the moment.

use std::{collections::BTreeSet, sync::Arc};

use super::member::Member;

/// The members, in the order in which they came.
#[derive(Debug, Default)]
pub struct Roster {
    members: Vec<Arc<Member>>,
    /// The first so many are there for good.
    fixed: usize,
}

/// What a look at the name changed.
#[derive(Debug, Default)]
pub struct Change {
    /// New.
    pub joined: Vec<Arc<Member>>,
    /// Taken out: they get nothing more, and what runs there goes on.
    pub left: Vec<Arc<Member>>,
}

impl Roster {
    /// Of members that stay.
    pub fn fixed(members: Vec<Arc<Member>>) -> Self {
        Self { fixed: members.len(), members }
    }

    /// All of them.
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// Takes in who is found now beside the fixed ones, made by `join` where they are new, and takes out who is not.
    pub fn found(
        &mut self,
        names: &BTreeSet<String>,
        mut join: impl FnMut(&str) -> Option<Member>,
    ) -> Change {
        let mut change = Change::default();
        let mut place = 0;
        self.members.retain(|member| {
            place += 1;
            let stays = place <= self.fixed || names.contains(&member.name);
            if !stays {
                member.remove();
                change.left.push(member.clone());
            }
            stays
        });
        for name in names {
            if self.members.iter().all(|member| member.name != *name)
                && let Some(member) = join(name)
            {
                change.joined.push(Arc::new(member));
            }
        }
        self.members.extend(change.joined.iter().cloned());
        change
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tutti_runtime::prefix_index::Holder;

    use super::*;
    use crate::fleet::{FleetSettings, address, member::Timeouts};

    fn member(name: &str) -> Option<Member> {
        let way = address::connection(name, &FleetSettings::default()).ok()?;
        let timeouts = Timeouts { answer: Duration::from_secs(1), accept: Duration::from_secs(1) };
        Some(Member::new(name.to_owned(), way, timeouts, Holder(0)))
    }

    fn names(members: &[Arc<Member>]) -> Vec<&str> {
        members.iter().map(|member| member.name.as_str()).collect()
    }

    #[tokio::test]
    async fn members_come_and_go_with_the_name_and_the_fixed_ones_stay() {
        let (a, b, c) = ("http://a:1", "http://b:1", "http://c:1");
        let mut roster = Roster::fixed(vec![Arc::new(member(a).unwrap())]);
        let set = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let change = roster.found(&set(&[a, b]), member);
        assert_eq!((names(&change.joined), names(roster.members())), (vec![b], vec![a, b]));
        let first_b = roster.members()[1].clone();
        let change = roster.found(&set(&[c]), member);
        assert_eq!((names(&change.left), names(roster.members())), (vec![b], vec![a, c]));
        assert!(first_b.is_removed() && !roster.members()[0].is_removed());
        // One that comes back is another: what was said of it before is not held against it.
        roster.found(&set(&[b, c]), member);
        assert!(!roster.members().iter().any(|member| Arc::ptr_eq(member, &first_b)));
        assert_eq!(names(roster.members()), [a, c, b]);
    }
}
