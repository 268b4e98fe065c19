//! Which groups of workers there are, and which ranks are whose.
//!
//! A group is of one or more *replicas*, each of which holds its part of the model once, divided among `tp` ranks: the
//! lowest of them leads. Ranks are counted through all replicas of all groups in order.

use tutti_proto::Rank;

/// Workers that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// For logs, metrics and messages.
    pub name: String,
    /// Nodes of the model that it holds; all of them without.
    pub nodes: Option<Vec<String>>,
    /// Walks that it runs; all over its nodes without.
    pub walks: Option<Vec<String>>,
    /// Ranks of each replica, at least 1.
    pub tp: u32,
    /// At least 1.
    pub replicas: u32,
    /// Whether the conductor starts its workers; they join by hand otherwise.
    pub spawned: bool,
}

impl GroupSpec {
    /// Ranks of all its replicas.
    pub fn ranks(&self) -> u32 {
        self.tp * self.replicas
    }
}

/// One replica of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// Placement of its group in the topology.
    pub group: usize,
    /// Its lowest rank, which leads.
    pub leader: Rank,
    /// How many ranks it has.
    pub tp: u32,
}

impl Replica {
    /// All of them, whether they are here or not.
    pub fn ranks(self) -> impl Iterator<Item = Rank> {
        (self.leader.0..self.leader.0 + self.tp).map(Rank)
    }
}

/// The groups of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    groups: Vec<GroupSpec>,
    /// Whether ranks beyond those of the groups are more replicas of the last one.
    open: bool,
}

impl Default for Topology {
    fn default() -> Self {
        Self::all_in_one(1, 1)
    }
}

impl Topology {
    /// These groups and no others; at least one. Those that the conductor spawns come first, so that their ranks do.
    pub fn new(groups: Vec<GroupSpec>) -> Self {
        Self { groups, open: false }
    }

    /// Workers that run whole requests, `tp` of them a replica; others like them may join by hand.
    pub fn all_in_one(workers: u32, tp: u32) -> Self {
        let tp = tp.max(1);
        let name = "all".to_owned();
        let group = GroupSpec { name, nodes: None, walks: None, tp, replicas: workers / tp, spawned: true };
        Self { groups: vec![group], open: true }
    }

    /// In order of rank.
    pub fn groups(&self) -> &[GroupSpec] {
        &self.groups
    }

    /// The name of the group in this place.
    pub fn group_name(&self, group: usize) -> &str {
        self.groups.get(group).map_or("", |group| &group.name)
    }

    /// Ranks below this are of workers that the conductor spawns.
    pub fn spawned_workers(&self) -> u32 {
        self.groups.iter().filter(|group| group.spawned).map(GroupSpec::ranks).sum()
    }

    /// All ranks that belong somewhere; without an end where the topology is open.
    pub fn ranks(&self) -> u32 {
        if self.open { u32::MAX } else { self.groups.iter().map(GroupSpec::ranks).sum() }
    }

    /// Whether groups differ in what they run of a request, as far as a topology can tell without its model.
    pub fn is_disaggregated(&self) -> bool {
        self.groups.iter().any(|group| group.walks.is_some() || group.nodes.is_some())
    }

    /// Whether any worker has others to keep in step with.
    pub fn has_tp(&self) -> bool {
        self.groups.iter().any(|group| group.tp > 1)
    }

    /// The replica that a rank belongs to, if it belongs to any.
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
mod tests {
    use super::*;

    fn group(name: &str, tp: u32, replicas: u32) -> GroupSpec {
        GroupSpec { name: name.into(), nodes: None, walks: None, tp, replicas, spawned: true }
    }

    #[test]
    fn ranks_are_counted_through_replicas_and_groups() {
        let by_hand = GroupSpec { spawned: false, ..group("c", 1, 1) };
        let topology = Topology::new(vec![group("a", 2, 2), group("b", 1, 2), by_hand]);
        assert_eq!((topology.spawned_workers(), topology.ranks()), (6, 7));
        let of = |rank| topology.replica_of(Rank(rank)).map(|r| (r.group, r.leader.0, r.tp));
        let expected = [(0, 0, 2), (0, 0, 2), (0, 2, 2), (0, 2, 2), (1, 4, 1), (1, 5, 1), (2, 6, 1)];
        assert_eq!((0..7).map(|rank| of(rank).unwrap()).collect::<Vec<_>>(), expected);
        assert_eq!(of(7), None);
        assert_eq!(topology.replica_of(Rank(3)).unwrap().ranks().collect::<Vec<_>>(), [Rank(2), Rank(3)]);
    }

    #[test]
    fn without_a_file_more_of_the_same_may_join() {
        let topology = Topology::all_in_one(2, 2);
        assert_eq!(topology.spawned_workers(), 2);
        let beyond = topology.replica_of(Rank(5)).unwrap();
        assert_eq!((beyond.group, beyond.leader, beyond.tp), (0, Rank(4), 2));
    }
}
