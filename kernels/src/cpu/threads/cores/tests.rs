use super::*;

fn cores(nodes: usize, cores: usize) -> Cores {
    // A common numbering on Linux: the first hardware thread of every core, then the second of every core.
    let all = nodes * cores;
    Cores::ordered((0..2 * all).map(|cpu| {
        let core = cpu % all;
        (CoreId { node: core % nodes, package: core % nodes, core }, cpu)
    }))
}

#[test]
fn a_workers_cores_are_on_one_node_and_whole() {
    let cores = cores(2, 4);
    // Cores 0, 2, 4, 6 are on node 0. The second hardware thread of core n is 8 + n.
    assert_eq!(cores.numbers(), [0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15]);
    assert_eq!(cores.share(0, 8).numbers(), [0, 8, 2, 10, 4, 12, 6, 14]);
    assert_eq!(cores.share(1, 8).numbers(), [1, 9, 3, 11, 5, 13, 7, 15]);
    assert_eq!(cores.share(3, 2).numbers(), [6, 14]);
}

#[test]
fn workers_share_no_core_while_there_are_enough() {
    let cores = cores(1, 3);
    for threads in 1..=6 {
        let workers = 6 / threads;
        let mut taken: Vec<_> =
            (0..workers).flat_map(|index| cores.share(index, threads).numbers().to_vec()).collect();
        taken.sort_unstable();
        taken.dedup();
        assert_eq!(taken.len(), workers * threads, "{threads} threads");
    }
    assert_eq!(cores.share(5, 4).numbers().len(), 4, "a worker too many has another's");
    assert_eq!(cores.share(0, 8).numbers().len(), 8, "more threads than cores");
}
