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
