//! `y = x · Wᵀ` in eight bits.
//!
//! Activations are quantised first, into tiles of a few rows. A word packs two or four quantised activations. Each step
//! of the loop over the inputs reads one word of every row of a tile, and these words are adjacent. Then every panel of
//! weights is multiplied by every tile while the panel is in the cache, so that weights are read from memory once for
//! all rows.

mod micro_kernel;

use self::micro_kernel::add_product;
use super::activations::{PackTile, row_words};
use super::format::{GROUP, Int8Matrix, group_bytes, panel_bytes};
use super::scratch::Scratch;
use super::work::Work;
use crate::DeviceError;
use crate::cpu::gemm::groups::{Group, GroupTasks};
use crate::cpu::gemm::tile::{FindTileLimits, Tiling, for_tile};
use crate::cpu::gemm::{Epilogue, Product};
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::memory::{Shared, Weights};
use crate::cpu::rowwise::SiluMul;
use crate::cpu::sampling::argmax::UpdateArgmax;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;

/// Number of bytes of weights that stay in the second-level cache while all tiles are multiplied by them.
const CACHED_WEIGHTS: usize = 204 << 10;
/// Number of inputs per block, a multiple of [`GROUP`]. On most paths, a tile's activations and a panel's weights for
/// the inputs of a block fit the first-level cache together. On paths with large tiles, blocks are longer and fit only
/// the second-level cache, because each end of a block costs each tile a load and a store of its sums.
const fn block_inputs<S: Simd>() -> usize {
    if S::TILE_ROWS >= 12 { 16 * GROUP } else { 4 * GROUP }
}
/// Maximum number of panels that a tile is multiplied by at once. The index of a task's first panel is a multiple of
/// this number, so that both panels of a pair (gate and up) belong to one task.
const MOST_PANELS: usize = 4;
/// Maximum number of tiles that share the prefetching of weights.
const FEW_TILES: usize = 4;
/// Minimum number of activations per packing task, below which waking another thread costs more than it saves.
const PACKED_AT_ONCE: usize = 8 << 10;

/// Returns the matrix that multiplies the rows of a group.
fn matrix(matrices: &[Weights], group: Group) -> &Int8Matrix {
    let Weights::Int8(matrix) = &matrices[group.matrix] else { unreachable!("a matrix that is not in int8") };
    matrix
}

/// Computes a matrix product in int8. `scratch` must have room for the product's rows and inputs.
pub(in crate::cpu) fn linear(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'_>,
) -> Result<(), DeviceError> {
    let Product { x, groups, matrices, epilogue, out } = product;
    let Some(shape) = groups.first().map(|group| matrix(matrices, *group).shape) else { return Ok(()) };
    scratch.used = true;
    let Scratch { activations, sums, tasks, .. } = scratch;
    let (activations, sums) = (Shared::new(&mut activations[..]), Shared::new(&mut sums[..]));
    let out = Shared::new(out);
    let (sums, width) = match epilogue {
        Epilogue::Gated => (&sums, shape.panels() * LANES),
        Epilogue::Set(_) | Epilogue::Add(_) | Epilogue::Largest(_) | Epilogue::PanelMaxima(_) => {
            (&out, shape.outputs)
        }
    };
    let largest_tile = path.run_int8(FindTileLimits).several;
    let work = |group: Group, thread: usize| Work {
        x,
        tiling: Tiling::of(group.rows, largest_tile),
        activations: &activations,
        matrix: matrix(matrices, group),
        epilogue,
        sums,
        width,
        out: &out,
        thread,
    };
    let product = GroupProducts { path, groups, shape, work };
    product.pack(pool, tasks)?;
    product.multiply(pool, tasks)
}

/// The matrix products of all groups, as tasks for threads. `work(group, thread)` returns the state that the tasks of a
/// group's product share on one thread.
struct GroupProducts<'a, F> {
    path: Path,
    groups: &'a [Group],
    /// Shape of all matrices.
    shape: Shape,
    work: F,
}

impl<'a, F: Fn(Group, usize) -> Work<'a> + Sync> GroupProducts<'_, F> {
    /// Packs the activations of all rows.
    fn pack(&self, pool: &mut ThreadPool, tasks: &mut GroupTasks) -> Result<(), DeviceError> {
        let input_groups = self.shape.inputs.div_ceil(GROUP);
        let share = |tiling: Tiling| (PACKED_AT_ONCE / tiling.tile(0).1.max(1)).div_ceil(GROUP);
        let count = |group: Group| {
            let tiling = self.tiling(group);
            tiling.tiles * input_groups.div_ceil(share(tiling))
        };
        tasks.run(pool, self.groups, count, |group, task, thread| {
            let work = (self.work)(group, thread);
            let share = share(work.tiling);
            let shares = input_groups.div_ceil(share);
            let (tile, first) = (task / shares, task % shares * share);
            self.path.run_int8(PackTile { work, tile, groups: (first, input_groups.min(first + share)) });
        })
    }

    /// Multiplies packed activations by the weights.
    fn multiply(&self, pool: &mut ThreadPool, tasks: &mut GroupTasks) -> Result<(), DeviceError> {
        let (panels, threads, groups) = (self.shape.panels(), pool.threads(), self.groups.len());
        // Returns the number of panels per task, the number of tiles per task, and the number of ranges of tiles.
        let division = |tiling: Tiling| {
            // Several tasks per thread balance the load. With a single tile, most time is spent on fetching weights, so
            // tasks can be smaller.
            let each = if tiling.tiles == 1 { 8 } else { 4 };
            let share = panels.div_ceil((each * threads).div_ceil(groups)).next_multiple_of(MOST_PANELS);
            let columns = panels.div_ceil(share) * groups;
            let bands = (2 * threads).div_ceil(columns).min(tiling.tiles).max(1);
            (share, tiling.tiles.div_ceil(bands), bands)
        };
        let count = |group: Group| {
            let (share, _, bands) = division(self.tiling(group));
            panels.div_ceil(share) * bands
        };
        tasks.run(pool, self.groups, count, |group, task, thread| {
            let work = (self.work)(group, thread);
            let (share, band, bands) = division(work.tiling);
            let (column, first) = (task / bands, task % bands * band);
            self.path.run_int8(Block {
                work,
                panels: (column * share, panels.min((column + 1) * share)),
                tiles: (first, work.tiling.tiles.min(first + band)),
            });
        })
    }

    /// The tiles of a group's rows, which are the same for every thread.
    fn tiling(&self, group: Group) -> Tiling {
        (self.work)(group, 0).tiling
    }
}

/// One task: the matrix product of tiles `tiles.0..tiles.1` and panels `panels.0..panels.1`.
#[derive(Clone, Copy)]
struct Block<'a> {
    work: Work<'a>,
    panels: (usize, usize),
    tiles: (usize, usize),
}

impl Op for Block<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, panels: (mut first, end), tiles } = self;
        let inputs = work.matrix.shape.inputs;
        // Number of panels whose weights stay in the cache. It is a multiple of `MOST_PANELS`, because reading one
        // panel at a time uses less of the memory's bandwidth than reading four.
        let cached = CACHED_WEIGHTS / panel_bytes(inputs).max(1) / MOST_PANELS * MOST_PANELS;
        let cached = cached.max(MOST_PANELS);
        // With a single tile, all inputs are one block, so that weights are read in memory order.
        let count = tiles.1.saturating_sub(tiles.0);
        let at_once = if count > 1 { const { block_inputs::<S>() } } else { usize::MAX };
        // With a few tiles, multiplying takes about as long as fetching the weights, so the tiles share the prefetching
        // of the next panels.
        let shared = count > 1 && count <= FEW_TILES && inputs <= at_once;
        let cached = if shared { MOST_PANELS } else { cached };
        while first < end {
            let last = end.min(first + cached);
            let mut from = 0;
            while from < inputs {
                let to = inputs.min(from.saturating_add(at_once));
                for tile in tiles.0..tiles.1 {
                    let (row, rows) = work.tiling.tile(tile);
                    let ahead =
                        shared.then_some(Ahead { panels: cached, share: tile - tiles.0, shares: count });
                    for_tile!(S, rows, s.call(RowTile::<R, P> { work, row, first, last, from, to, ahead }));
                }
                from = to;
            }
            if matches!(work.epilogue, Epilogue::Gated) {
                self.gate(s, first, last);
            }
            first = last;
        }
    }
}

impl Block<'_> {
    /// Applies the gated activation to panels `first .. last`, whose sums are complete and still in a cache.
    #[inline(always)]
    fn gate<S: Simd>(self, s: S, first: usize, last: usize) {
        let Self { work, tiles, .. } = self;
        let gates = work.matrix.shape.outputs / 2;
        for row in work.tiling.end(tiles.0)..work.tiling.end(tiles.1) {
            for panel in (first..last).step_by(2) {
                let column = panel / 2 * LANES;
                // SAFETY: no other task accesses these rows of these panels, and the two panels differ.
                unsafe {
                    let (gate, up) = (work.sums(row, panel), work.sums(row, panel + 1));
                    let out = work.out.slice_mut(row * gates + column, LANES.min(gates - column));
                    s.call(SiluMul { gate: &gate[..out.len()], up: &up[..out.len()], out });
                }
            }
        }
    }
}

/// The matrix product of a tile (`R` rows from `row` on) and panels `first .. last`, computed `P` panels at a time. The
/// product covers inputs `from .. to`, which are whole groups.
struct RowTile<'a, const R: usize, const P: usize> {
    work: Work<'a>,
    row: usize,
    first: usize,
    last: usize,
    from: usize,
    to: usize,
    ahead: Option<Ahead>,
}

/// A tile's share of the prefetches. While the tile is multiplied by panel `p`, it prefetches panel `p + panels` if `p
/// % shares == share`.
#[derive(Clone, Copy)]
struct Ahead {
    panels: usize,
    share: usize,
    shares: usize,
}

impl Ahead {
    /// Returns the distance in panels from `panel` to the panel that the tile prefetches while it is multiplied by
    /// `panel`. 0 stands for no prefetch.
    #[inline(always)]
    fn further(self, panel: usize) -> usize {
        if panel % self.shares == self.share { self.panels } else { 0 }
    }
}

impl<const R: usize, const P: usize> Op for RowTile<'_, R, P> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut panel = self.first;
        while panel + P <= self.last {
            self.tile::<S, P>(s, panel);
            panel += P;
        }
        while panel < self.last {
            self.tile::<S, 1>(s, panel);
            panel += 1;
        }
    }
}

impl<const R: usize, const P: usize> RowTile<'_, R, P> {
    #[inline(always)]
    fn tile<S: Simd, const N: usize>(&self, s: S, panel: usize) {
        let Self { work, row, from, to, ahead, .. } = *self;
        let bytes = panel_bytes(work.matrix.shape.inputs);
        let data = &work.matrix.data[panel * bytes..(panel + N) * bytes];
        let groups = from / GROUP;
        let panels: [*const u8; N] =
            std::array::from_fn(|p| data[p * bytes + groups * group_bytes(GROUP)..].as_ptr());
        let further = std::array::from_fn(|p| ahead.map_or(0, |ahead| ahead.further(panel + p) * bytes));
        let mut sums = [[s.splat(0.0); N]; R];
        for (r, sums) in sums.iter_mut().enumerate() {
            for (p, sum) in sums.iter_mut().enumerate() {
                if from > 0 || matches!(work.epilogue, Epilogue::Add(_)) {
                    // SAFETY: no other task accesses these rows of these panels.
                    *sum = s.load_some(unsafe { work.sums(row + r, panel + p) }, 0.0);
                }
            }
        }
        // SAFETY: the tile's words are packed, and no task writes to them now. The panels lie within `data`, whose
        // range was checked.
        unsafe {
            let words = row * row_words(work.matrix.shape.inputs, S::DOT_INPUTS)
                + R * groups * (2 + GROUP / S::DOT_INPUTS);
            let x = work.activations.as_ptr().add(words).cast_const();
            add_product::<S, R, N>(s, &mut sums, x, panels, to - from, bytes, further);
        }
        let bias = match work.epilogue {
            Epilogue::Set(bias) | Epilogue::Add(bias) if to == work.matrix.shape.inputs => bias,
            _ => None,
        };
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                if let (Epilogue::PanelMaxima(maxima), true) = (work.epilogue, to == work.matrix.shape.inputs)
                {
                    work.store_maximum(s, maxima, row + r, panel + p, sum);
                    continue;
                }
                // SAFETY: no other task accesses these rows of these panels, and this task holds no other slice of them
                // now.
                let out = unsafe { work.sums(row + r, panel + p) };
                let sum = match bias {
                    Some(bias) => s.add(sum, s.load_some(&bias[(panel + p) * LANES..][..out.len()], 0.0)),
                    None => sum,
                };
                s.store_some(out, sum);
                if let (Epilogue::Largest(partial), true) = (work.epilogue, to == work.matrix.shape.inputs) {
                    let (thread, row, first) = (work.thread, row + r, (panel + p) * LANES);
                    s.call(UpdateArgmax { partial, thread, row, first, logits: out });
                }
            }
        }
    }
}
