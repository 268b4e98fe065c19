//! `y = x · Wᵀ` with weights that are packed into panels (see [`crate::cpu::memory::format`]).
//!
//! A matrix product first packs its activations ([`activations`]) into tiles of a few rows. A tile is transposed, so
//! that the elements of its rows for the same input are adjacent. The elements are converted to the type that the
//! [micro-kernel](micro_kernel) multiplies. If there is only one tile and it is small, each thread packs a copy of it
//! for itself ([`has_copies`]).
//!
//! Weights are then read from memory once for all rows: whole panels at a time if the rows fit one tile ([`small_m`]),
//! in cache blocks otherwise ([`blocked`]). Several matrices can multiply rows of their own in one operation
//! ([`groups`]). An [epilogue](Epilogue) is applied to the sums as they are stored.

mod activations;
mod blocked;
mod candidates;
mod epilogue;
pub(super) mod groups;
pub(super) mod input;
mod micro_kernel;
mod scratch;
mod small_m;
pub(super) mod tile;
mod work;

use self::activations::PackActivations;
use self::blocked::{Bands, Blocked, SUMS, TASK_PANELS};
pub(super) use self::candidates::{Candidate, find_largest};
pub(super) use self::epilogue::Epilogue;
pub(super) use self::micro_kernel::Layout;
use self::micro_kernel::{BlockFloat, Data, Dots, MicroKernel, Widened};
pub(super) use self::scratch::Scratch;
use self::scratch::THREAD_FLOATS;
use self::small_m::SmallM;
use self::work::Work;
use crate::DeviceError;
use crate::cpu::gemm::groups::Group;
use crate::cpu::gemm::input::Input;
use crate::cpu::gemm::tile::{FindTileLimits, TileLimits, Tiling};
use crate::cpu::memory::format::{F16, F32, Stored};
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::memory::matrix::{Elements, Matrix};
use crate::cpu::memory::{Shared, Weights};
use crate::cpu::simd::isa::Path;
use crate::cpu::threads::pool::ThreadPool;

/// The operands of one matrix product.
pub(super) struct Product<'a> {
    pub(super) x: Input<'a>,
    /// The rows of each matrix, ascending. All matrices that have rows are of one [kind](Weights::is_like).
    pub(super) groups: &'a [Group],
    pub(super) matrices: &'a [Weights],
    pub(super) epilogue: Epilogue<'a>,
    /// Results: `[rows, outputs]`, or `[rows, gates]` for paired matrices.
    pub(super) out: &'a mut [f32],
}

/// Minimum number of tasks per thread of a matrix product of several tiles, if there are enough panels. Several tasks
/// per thread balance the load.
const BLOCKED_TASKS: usize = 8;
/// Minimum number of tasks per thread of a matrix product of one tile, if there are enough panels. Short tasks let all
/// threads end at nearly the same time, although the threads' shares of the memory bandwidth differ.
const SMALL_M_TASKS: usize = 32;

/// Computes a matrix product. `scratch` must have room for the product's rows and inputs.
pub(super) fn linear(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'_>,
) -> Result<(), DeviceError> {
    let Some(matrix) = product.groups.first().map(|group| product.matrix(*group)) else { return Ok(()) };
    match &matrix.data {
        Elements::Stored(Stored::F32(_)) => multiply::<Widened<F32>>(path, pool, scratch, product),
        Elements::Stored(Stored::F16(_)) => multiply::<Widened<F16>>(path, pool, scratch, product),
        // On paths without dot products of bfloat16, only embedding tables are stored as bfloat16: see `Form::of`.
        Elements::Stored(Stored::Bf16(_)) if !path.dots_bf16() => {
            let why = "a table of embeddings, where a matrix for products is wanted";
            Err(DeviceError::Misuse(why.to_owned()))
        }
        Elements::Stored(Stored::Bf16(_)) => multiply::<Dots>(path, pool, scratch, product),
        Elements::BlockFloat(_) => multiply::<BlockFloat>(path, pool, scratch, product),
    }
}

impl<'a> Product<'a> {
    /// Returns the matrix that multiplies the rows of a group.
    fn matrix(&self, group: Group) -> &'a Matrix {
        let Weights::Stored(matrix) = &self.matrices[group.matrix] else { unreachable!("a matrix in int8") };
        matrix
    }
}

/// Computes a matrix product with one micro-kernel.
fn multiply<K: MicroKernel>(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    mut product: Product<'_>,
) -> Result<(), DeviceError> {
    let out = Shared::new(std::mem::take(&mut product.out));
    let Product { x, groups, epilogue, .. } = product;
    let Some(shape) = groups.first().map(|group| product.matrix(*group).shape) else { return Ok(()) };
    let Scratch { activations, threads: floats, tasks } = scratch;
    let (activations, floats) = (Shared::new(&mut activations[..]), Shared::new(&mut floats[..]));
    let (limits, threads) = (K::run(path, FindTileLimits), pool.threads());
    let pack = PackActivations { x, inputs: shape.inputs, groups, limits };

    let division = |group: Group| {
        let tiling = limits.divide(group.rows);
        (tiling, Division::new::<K>(path, tiling, shape, threads, groups.len()))
    };
    let run = |group: Group, task: usize, activations: &Shared<'_, f32>, thread: usize| {
        let (tiling, division) = division(group);
        let matrix = product.matrix(group);
        let Some(elements) = K::elements(&matrix.data) else {
            unreachable!("matrices of several kinds in one product")
        };
        let data = Data { elements, steps: shape.steps() };
        let work = Work { tiling, activations, matrix, epilogue, out: &out, thread };
        let (panels, tiles) = division.task(task);
        if tiling.tiles == 1 {
            K::run(path, SmallM::<K> { work, data, panels });
        } else {
            // SAFETY: each thread accesses only its own range, and runs one task at a time. Matrix products of several
            // tiles keep no copies of the activations in this range.
            let sums = unsafe { floats.slice_mut(thread * THREAD_FLOATS, SUMS) };
            K::run(path, Blocked::<K> { work, data, panels, tiles, sums });
        }
    };
    if let Some(group) = has_copies::<K>(groups, limits, shape.steps()) {
        let (tiling, division) = division(group);
        // SAFETY: each thread accesses only its own range, and runs one closure at a time.
        let copy = |thread: usize| unsafe { floats.slice_mut(thread * THREAD_FLOATS, THREAD_FLOATS) };
        let prepare = |thread: usize| pack.only_tile::<K>(path, tiling, copy(thread));
        return pool.run_prepared(division.tasks(), prepare, |task, thread| {
            run(group, task, &Shared::new(copy(thread)), thread);
        });
    }
    pack.run::<K>(path, (pool, tasks), &activations)?;
    let count = |group: Group| division(group).1.tasks();
    tasks.run(pool, groups, count, |group, task, thread| run(group, task, &activations, thread))
}

/// Returns the only group if its activations are one tile that fits [`THREAD_FLOATS`]. Each thread then packs its own
/// copy of the activations. Threads need no barrier between packing and multiplying, and read no activations from
/// another core's cache. This saves more time than the repeated packing costs.
fn has_copies<K: MicroKernel>(groups: &[Group], limits: TileLimits, steps: usize) -> Option<Group> {
    let &[group] = groups else { return None };
    let (first, end) = group.rows;
    let fits = first == 0 && K::LAYOUT.tile_words(end, steps) <= THREAD_FLOATS;
    (fits && limits.divide(group.rows).tiles == 1).then_some(group)
}

/// The division of one group's matrix product into tasks. A task is a range of panels and a range of tiles.
struct Division {
    panels: usize,
    /// Number of panels per task.
    share: usize,
    /// Number of ranges of panels.
    columns: usize,
    tiles: usize,
    /// Number of tiles per task.
    band: usize,
}

impl Division {
    /// Divides the matrix product of the rows of `tiling` into tasks. `groups` is the number of groups in the
    /// operation.
    fn new<K: MicroKernel>(path: Path, tiling: Tiling, shape: Shape, threads: usize, groups: usize) -> Self {
        let (panels, tiles) = (shape.panels(), tiling.tiles);
        let share = |tasks: usize| panels.div_ceil((tasks * threads).div_ceil(groups)).max(1);
        if tiles <= 1 {
            // The share is a multiple of four panels, because the micro-kernel of a single row computes four panels at
            // once.
            let share = share(SMALL_M_TASKS).next_multiple_of(4);
            return Self { panels, share, columns: panels.div_ceil(share), tiles, band: 1 };
        }
        // In a paired matrix (gate and up), both panels of a pair belong to one task, so `share` is even.
        let least = if shape.paired { 2 } else { 1 };
        let share = share(BLOCKED_TASKS).next_multiple_of(least).min(TASK_PANELS);
        let columns = panels.div_ceil(share);
        // A task covers a band of tiles (see [`blocked`]), or fewer tiles if threads would otherwise stay idle.
        let fewest = (2 * threads).div_ceil(columns * groups);
        let bands = K::run(path, Bands(tiling)).max(fewest).min(tiles);
        Self { panels, share, columns, tiles, band: tiles.div_ceil(bands.max(1)) }
    }

    fn tasks(&self) -> usize {
        self.columns * self.tiles.div_ceil(self.band)
    }

    /// The panels and the tiles of a task.
    fn task(&self, task: usize) -> ((usize, usize), (usize, usize)) {
        // A thread usually runs consecutive tasks. Consecutive tasks share a band of tiles. The band's activations,
        // which are larger than a task's weights, therefore stay in the second-level cache.
        let (panel, tile) = (task % self.columns * self.share, task / self.columns * self.band);
        ((panel, self.panels.min(panel + self.share)), (tile, self.tiles.min(tile + self.band)))
    }
}

#[cfg(test)]
mod tests;
