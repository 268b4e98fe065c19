//! Grids of patches: their order, their learned positions, and their angles of rotation.

/// The patches of a picture or of frames. Patches are in the order of frames, then of tokens, which are squares of
/// patches, and then of the patches of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PatchGrid {
    /// Number of frames, each of them as deep as a patch; 1 for a picture.
    pub frames: usize,
    /// Lines of patches.
    pub height: usize,
    /// Patches per line.
    pub width: usize,
}

impl PatchGrid {
    pub fn patches(&self) -> usize {
        self.frames.saturating_mul(self.height).saturating_mul(self.width)
    }

    /// True if tokens of `merge × merge` patches cover the grid.
    pub fn is_divisible_by(&self, merge: usize) -> bool {
        self.height.is_multiple_of(merge) && self.width.is_multiple_of(merge)
    }

    /// Returns the line and the column of each patch of one frame, in order.
    pub fn coordinates(&self, merge: usize) -> impl Iterator<Item = [usize; 2]> + use<> {
        let (per_token, tokens_per_line) = (merge * merge, self.width / merge);
        (0..self.height * self.width).map(move |index| {
            let (token, inside) = (index / per_token, index % per_token);
            let line = token / tokens_per_line * merge + inside / merge;
            [line, token % tokens_per_line * merge + inside % merge]
        })
    }
}

/// The table of learned positions, `[side, side, width]`.
pub(super) struct PositionTable {
    pub side: usize,
    pub width: usize,
    pub values: Vec<f32>,
}

impl PositionTable {
    /// Returns the position of each patch, interpolated between four entries so that the corners of the table are the
    /// corners of the picture.
    pub fn of(&self, pictures: &[PatchGrid], merge: usize) -> Vec<f32> {
        let mut rows = Vec::new();
        for grid in pictures {
            let first = rows.len();
            for [line, column] in grid.coordinates(merge) {
                let (lines, columns) = (self.taps(line, grid.height), self.taps(column, grid.width));
                let start = rows.len();
                rows.resize(start + self.width, 0.0);
                for (line, of_line) in lines {
                    for (column, of_column) in columns {
                        let entry = &self.values[(line * self.side + column) * self.width..][..self.width];
                        let weight = of_line * of_column;
                        rows[start..].iter_mut().zip(entry).for_each(|(row, entry)| *row += entry * weight);
                    }
                }
            }
            let end = rows.len();
            (1..grid.frames).for_each(|_| rows.extend_from_within(first..end));
        }
        rows
    }

    /// Returns the entries around index `index` of an axis of `size` patches, with their weights. Computed in f32, as
    /// in the reference.
    fn taps(&self, index: usize, size: usize) -> [(usize, f32); 2] {
        let last = self.side - 1;
        let at = index as f32 * last as f32 / size.saturating_sub(1).max(1) as f32;
        let floor = at.floor();
        let tap = |offset: f32| {
            let weight = (1.0 - (at - floor - offset).abs()).max(0.0);
            ((floor as usize + offset as usize).min(last), weight)
        };
        [tap(0.0), tap(1.0)]
    }
}

/// Returns the cosines and then the sines of each patch. In each, the first half of the frequencies turns with the line
/// and the second half with the column.
pub(super) fn angles(pictures: &[PatchGrid], merge: usize, head_dim: usize, theta: f64) -> Vec<f32> {
    let count = head_dim / 4;
    let frequency = |index: usize| (1.0 / theta.powf(index as f64 / count as f64)) as f32;
    let frequencies: Vec<f32> = (0..count).map(frequency).collect();
    let mut rows = Vec::new();
    for grid in pictures {
        let first = rows.len();
        for patch in grid.coordinates(merge) {
            let turns =
                patch.into_iter().flat_map(|at| frequencies.iter().map(move |it| f64::from(at as f32 * it)));
            let (sines, cosines): (Vec<f64>, Vec<f64>) = turns.map(f64::sin_cos).unzip();
            rows.extend(cosines.into_iter().chain(sines).map(|x| x as f32));
        }
        let end = rows.len();
        (1..grid.frames).for_each(|_| rows.extend_from_within(first..end));
    }
    rows
}
