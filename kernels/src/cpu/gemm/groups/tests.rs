use std::sync::Mutex;

use super::*;

#[test]
fn every_task_of_every_group_runs_once() {
    let groups = [(0, 3), (3, 3), (3, 4), (4, 9), (9, 9)].map(|rows| Group { matrix: rows.0, rows });
    for threads in [1, 3] {
        let mut pool = ThreadPool::new(threads).unwrap();
        let mut tasks = GroupTasks::default();
        for groups in [&groups[..], &groups[..1], &[]] {
            let ran = Mutex::new(Vec::new());
            tasks
                .run(
                    &mut pool,
                    groups,
                    |group| 2 * (group.rows.1 - group.rows.0),
                    |group, index, _| {
                        ran.lock().unwrap().push((group.rows, index));
                    },
                )
                .unwrap();
            let mut ran = ran.into_inner().unwrap();
            ran.sort_unstable();
            let wanted: Vec<_> = groups
                .iter()
                .flat_map(|group| (0..2 * (group.rows.1 - group.rows.0)).map(|index| (group.rows, index)))
                .collect();
            assert_eq!(ran, wanted);
        }
    }
}
