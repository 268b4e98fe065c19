//! Membership of the fleet: permanent conductors given by URL, and conductors found by the last DNS lookup.

use std::{collections::BTreeSet, sync::Arc};

use super::member::Member;

/// The members in the order in which they joined.
#[derive(Debug, Default)]
pub struct Roster {
    members: Vec<Arc<Member>>,
    /// Number of permanent members, which come first in `members`.
    fixed: usize,
}

/// Changes made by one DNS lookup.
#[derive(Debug, Default)]
pub struct Change {
    /// New members.
    pub joined: Vec<Arc<Member>>,
    /// Removed members. They get no more requests; their running streams continue.
    pub left: Vec<Arc<Member>>,
}

impl Roster {
    /// Creates a roster of permanent members.
    pub fn fixed(members: Vec<Arc<Member>>) -> Self {
        Self { fixed: members.len(), members }
    }

    /// All members.
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// Makes the names of the non-permanent members equal to `names`: creates the missing members with `join`, and
    /// removes the members that are not in `names`.
    pub fn update(
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
