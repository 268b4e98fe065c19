//! The division of a window's columns into groups that share a scale.

use std::ops::Range;

/// The groups of the columns of a window. All rows have the same division, each with scales of its own.
#[derive(Debug)]
pub(in crate::weights) struct Groups {
    columns: usize,
    division: Division,
}

#[derive(Debug)]
enum Division {
    /// Runs of this many columns. The last may be shorter.
    Runs(usize),
    /// The group of each column, and the number of groups.
    Listed(Vec<u32>, usize),
}

impl Groups {
    /// Divides columns of a matrix into runs of `size`, counted from the matrix's first column. Returns the indices of
    /// the groups in the whole row as well.
    pub fn runs(columns: &Range<usize>, size: usize) -> (Self, Range<usize>) {
        let size = size.max(1);
        let first = columns.start / size;
        let groups = first..columns.end.div_ceil(size).max(first);
        let division = if columns.start.is_multiple_of(size) || groups.len() <= 1 {
            Division::Runs(size)
        } else {
            let of = |column: usize| (column / size - first) as u32;
            Division::Listed(columns.clone().map(of).collect(), groups.len())
        };
        (Self { columns: columns.len(), division }, groups)
    }

    /// Divides columns by a list of their groups, which are below `groups`.
    pub fn listed(of_columns: Vec<u32>, groups: usize) -> Self {
        Self { columns: of_columns.len(), division: Division::Listed(of_columns, groups) }
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Number of groups per row.
    pub fn per_row(&self) -> usize {
        match &self.division {
            Division::Runs(size) => self.columns.div_ceil(*size),
            Division::Listed(_, groups) => *groups,
        }
    }

    /// Returns the group of a column of the window.
    pub fn of_column(&self, column: usize) -> usize {
        match &self.division {
            Division::Runs(size) => column / size,
            Division::Listed(groups, _) => groups[column] as usize,
        }
    }
}
