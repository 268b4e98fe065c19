//! Matrix products with several weight matrices in one operation, such as the experts of a mixture. Each matrix
//! multiplies rows of its own.
//!
//! Products of few rows take tens of microseconds. In one operation, threads wait for each other once instead of once
//! per matrix.

use crate::DeviceError;
use crate::cpu::threads::pool::ThreadPool;

/// Rows of a matrix product, and the weight matrix that multiplies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct Group {
    /// Index of the matrix.
    pub(in crate::cpu) matrix: usize,
    /// Rows `rows.0..rows.1` of the input and of the results.
    pub(in crate::cpu) rows: (usize, usize),
}

impl Group {
    /// Returns the group of rows `0..rows` and matrix 0.
    pub(in crate::cpu) fn whole(rows: usize) -> Self {
        Self { matrix: 0, rows: (0, rows) }
    }
}

/// The tasks of all groups, one group after the other. The memory is reused by every matrix product.
#[derive(Default)]
pub(in crate::cpu) struct GroupTasks {
    /// Per group, the number of tasks of this group and all groups before it.
    ends: Vec<usize>,
}

impl GroupTasks {
    /// Calls `task(group, index, thread)` for every index below `count(group)` of every group, in any order and on any
    /// thread, as [`ThreadPool::run`] does.
    pub(in crate::cpu) fn run(
        &mut self,
        pool: &mut ThreadPool,
        groups: &[Group],
        count: impl Fn(Group) -> usize,
        task: impl Fn(Group, usize, usize) + Sync,
    ) -> Result<(), DeviceError> {
        let Self { ends } = self;
        let mut end = 0;
        ends.clear();
        ends.extend(groups.iter().map(|&group| {
            end += count(group);
            end
        }));
        pool.run(end, |index, thread| {
            let at = ends.partition_point(|&end| end <= index);
            let first = if at == 0 { 0 } else { ends[at - 1] };
            task(groups[at], index - first, thread);
        })
    }
}

#[cfg(test)]
mod tests;
