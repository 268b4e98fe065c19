//! The groups of workers and their ranks.
//!
//! A group has one or more *replicas*. Each replica holds the group's part of the model once, divided among `tp` ranks.
//! The lowest of these ranks is the leader. Ranks are numbered consecutively over all replicas of all groups, in order.

use tutti_proto::Rank;

/// Workers that run the same walks with the same settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// Name in logs, metrics and messages.
    pub name: String,
    /// Nodes of the model that the group holds; `None` for all.
    pub nodes: Option<Vec<String>>,
    /// Walks that the group runs; `None` for all walks whose nodes the group holds.
    pub walks: Option<Vec<String>>,
    /// Ranks per replica, at least 1.
    pub tp: u32,
    /// Number of replicas, at least 1.
    pub replicas: u32,
    /// True if the conductor spawns the workers; otherwise they join by hand.
    pub spawned: bool,
}

impl GroupSpec {
    /// Number of ranks of all the group's replicas together.
    pub fn ranks(&self) -> u32 {
        self.tp * self.replicas
    }
}

/// One replica of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// Index of the replica's group in the topology.
    pub group: usize,
    /// The replica's lowest rank.
    pub leader: Rank,
    /// Number of the replica's ranks.
    pub tp: u32,
}

impl Replica {
    /// The replica's ranks, joined or not.
    pub fn ranks(self) -> impl Iterator<Item = Rank> {
        (self.leader.0..self.leader.0 + self.tp).map(Rank)
    }
}

/// The groups of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    groups: Vec<GroupSpec>,
    /// True if workers may join with ranks beyond those of the groups, as further replicas of the last group.
    open: bool,
}

impl Default for Topology {
    fn default() -> Self {
        Self::all_in_one(1, 1)
    }
}

impl Topology {
    /// Creates a topology of exactly these groups. There must be at least one group. Spawned groups must come first, so
    /// that they have the lowest ranks.
    pub fn new(groups: Vec<GroupSpec>) -> Self {
        Self { groups, open: false }
    }

    /// Creates a topology of one group, whose `workers` workers run whole requests, with `tp` ranks per replica.
    /// Further replicas may join by hand.
    pub fn all_in_one(workers: u32, tp: u32) -> Self {
        let tp = tp.max(1);
        let name = "all".to_owned();
        let group = GroupSpec { name, nodes: None, walks: None, tp, replicas: workers / tp, spawned: true };
        Self { groups: vec![group], open: true }
    }

    /// The groups in order of rank.
    pub fn groups(&self) -> &[GroupSpec] {
        &self.groups
    }

    /// The index of a rank's group.
    pub fn group_of(&self, rank: Rank) -> Option<usize> {
        self.replica_of(rank).map(|replica| replica.group)
    }

    /// The name of a rank's group; empty for a rank of no group.
    pub fn group_name_of(&self, rank: Rank) -> &str {
        let group = self.group_of(rank).and_then(|group| self.groups.get(group));
        group.map_or("", |group| &group.name)
    }

    /// Number of ranks of the replica that a rank belongs to; 1 for a rank of no group.
    pub fn tp_of(&self, rank: Rank) -> u32 {
        self.replica_of(rank).map_or(1, |replica| replica.tp)
    }

    /// Number of workers that the conductor spawns. Their ranks are all ranks below this number.
    pub fn spawned_workers(&self) -> u32 {
        self.groups.iter().filter(|group| group.spawned).map(GroupSpec::ranks).sum()
    }

    /// Number of ranks that belong to any group; `u32::MAX` if further replicas of the last group may join.
    pub fn ranks(&self) -> u32 {
        if self.open { u32::MAX } else { self.groups.iter().map(GroupSpec::ranks).sum() }
    }

    /// True if groups may run different parts of a request, because some group names its walks or nodes. Whether the
    /// groups really do so is known only once the model is known.
    pub fn is_disaggregated(&self) -> bool {
        self.groups.iter().any(|group| group.walks.is_some() || group.nodes.is_some())
    }

    /// True if any group has more than one rank per replica.
    pub fn has_tp(&self) -> bool {
        self.groups.iter().any(|group| group.tp > 1)
    }

    /// The replica of a rank; `None` for a rank of no group.
    pub fn replica_of(&self, rank: Rank) -> Option<Replica> {
        let mut first = 0;
        for (index, group) in self.groups.iter().enumerate() {
            let beyond = self.open && index + 1 == self.groups.len();
            if rank.0 < first + group.ranks() || beyond {
                let leader = Rank(first + (rank.0 - first) / group.tp * group.tp);
                return Some(Replica { group: index, leader, tp: group.tp });
            }
            first += group.ranks();
        }
        None
    }
}

#[cfg(test)]
mod tests;
