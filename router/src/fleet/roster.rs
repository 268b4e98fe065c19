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
        let mut count = 0;
        self.members.retain(|member| {
            count += 1;
            let stays = count <= self.fixed || names.contains(&member.name);
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
mod tests;
