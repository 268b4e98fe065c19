//! `y = x · Wᵀ` with weights whose inputs are in groups that have scales of their own.
//!
//! Activations are packed first, into tiles of a few rows: see [`GroupedProduct::pack`]. Then every panel of weights is
//! multiplied by every tile while the panel is in the cache, so that weights are read from memory once for all rows.
//! The form of the weights determines the layout of packed activations and the micro-kernel, which a [`GroupedProduct`]
//! supplies.

mod pack;
mod scratch;
mod work;

use std::marker::PhantomData;

use self::pack::PackTile;
pub(in crate::cpu) use self::scratch::Scratch;
pub(super) use self::work::Work;
use crate::DeviceError;
use crate::cpu::gemm::groups::{Group, GroupTasks};
use crate::cpu::gemm::input::InputRow;
use crate::cpu::gemm::tile::{FindTileLimits, Tiling, for_tile};
use crate::cpu::gemm::{Epilogue, Product};
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::memory::{Shared, Weights};
use crate::cpu::rowwise::SiluMul;
use crate::cpu::sampling::argmax::UpdateArgmax;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;

/// Number of inputs per chunk. A product is divided into blocks of whole chunks, and each chunk of activations is
/// packed at once. A chunk holds whole groups.
pub(super) const CHUNK: usize = 128;

/// A kind of product: the form of the weights, the layout of the packed activations, and the micro-kernel.
pub(super) trait GroupedProduct: Copy + Send + Sync {
    /// Maximum number of rows per tile. With a smaller number, fewer variants of the micro-kernel are compiled.
    const MOST_ROWS: usize;

    /// Shape of the matrix.
    fn shape(self) -> Shape;
    /// The panels, one after the other.
    fn data(&self) -> &[u8];
    /// Size in bytes of the first `inputs` inputs of a panel. `inputs` is a multiple of [`CHUNK`] or the number of all
    /// inputs.
    fn panel_bytes(self, inputs: usize) -> usize;
    /// Number of words of the first `inputs` packed activations of a row, where `dot_inputs` is [`Simd::DOT_INPUTS`].
    /// `inputs` is a multiple of [`CHUNK`] or the number of all inputs.
    fn row_words(self, inputs: usize, dot_inputs: usize) -> usize;
    /// Packs the activations of a chunk, whose first input is `first`, for a tile of `R` rows.
    fn pack<S: Simd, const R: usize>(self, s: S, rows: &[InputRow<'_>; R], first: usize, to: &mut [u32]);
    /// Adds the matrix product of a tile's rows and the panels to `sums`, group by group. `sums[r][p]` holds sixteen
    /// lanes, the sums of row `r` and the sixteen outputs of panel `p`.
    ///
    /// # Safety
    ///
    /// `x` is readable for the words of `R` rows of `inputs` activations, and each of `panels` for the groups that hold
    /// these inputs. `further` holds, for each panel, the distance in bytes to the panel to prefetch. If the distance
    /// is 0, the weights that this tile multiplies next are prefetched instead.
    unsafe fn add_product<S: Simd, const R: usize, const P: usize>(
        self,
        s: S,
        sums: &mut [[S::F; P]; R],
        x: *const u32,
        panels: [*const u8; P],
        inputs: usize,
        further: [usize; P],
    );
}

/// Number of bytes of weights that stay in the second-level cache while all tiles are multiplied by them.
const CACHED_WEIGHTS: usize = 204 << 10;
/// Number of inputs per block, a multiple of [`CHUNK`]. On most paths, a tile's activations and a panel's weights for
/// the inputs of a block fit the first-level cache together. On paths with large tiles, blocks are longer and fit only
/// the second-level cache, because each end of a block costs each tile a load and a store of its sums.
const fn block_inputs<S: Simd>() -> usize {
    if S::TILE_ROWS >= 12 { 16 * CHUNK } else { 4 * CHUNK }
}
/// Maximum number of panels that a tile is multiplied by at once. The index of a task's first panel is a multiple of
/// this number, so that both panels of a pair (gate and up) belong to one task.
const MOST_PANELS: usize = 4;
/// Maximum number of tiles that share the prefetching of weights.
const FEW_TILES: usize = 4;
/// Minimum number of activations per packing task, below which waking another thread costs more than it saves.
const PACKED_AT_ONCE: usize = 8 << 10;

/// Computes a matrix product. `new` returns the kind of product with a matrix. `scratch` must have room for the
/// product's rows and inputs.
pub(super) fn linear<'a, K: GroupedProduct>(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    product: Product<'a>,
    new: impl Fn(&'a Weights) -> K + Sync,
) -> Result<(), DeviceError> {
    let Product { x, groups, matrices, epilogue, out } = product;
    let kernel = |group: Group| new(&matrices[group.matrix]);
    let Some(shape) = groups.first().map(|group| kernel(*group).shape()) else { return Ok(()) };
    scratch.used = true;
    let Scratch { activations, sums, tasks, .. } = scratch;
    let (activations, sums) = (Shared::new(&mut activations[..]), Shared::new(&mut sums[..]));
    let out = Shared::new(out);
    let (sums, width) = match epilogue {
        Epilogue::Gated(_) => (&sums, shape.panels() * LANES),
        Epilogue::Set(_) | Epilogue::Add(_) | Epilogue::Largest(_) | Epilogue::PanelMaxima(..) => {
            (&out, shape.outputs)
        }
    };
    let largest_tile = path.run_int8(FindTileLimits).several.min(K::MOST_ROWS);
    let work = |group: Group, thread: usize| Work {
        x,
        tiling: Tiling::of(group.rows, largest_tile),
        activations: &activations,
        kernel: kernel(group),
        epilogue,
        sums,
        width,
        out: &out,
        thread,
    };
    let product = GroupProducts { path, groups, shape, work, kernel: PhantomData };
    product.pack(pool, tasks)?;
    product.multiply(pool, tasks)
}

/// The matrix products of all groups, as tasks for threads. `work(group, thread)` returns the state that the tasks of a
/// group's product share on one thread.
struct GroupProducts<'a, K, F> {
    path: Path,
    groups: &'a [Group],
    /// Shape of all matrices.
    shape: Shape,
    work: F,
    kernel: PhantomData<K>,
}

impl<'a, K: GroupedProduct, F: Fn(Group, usize) -> Work<'a, K> + Sync> GroupProducts<'_, K, F> {
    /// Packs the activations of all rows.
    fn pack(&self, pool: &mut ThreadPool, tasks: &mut GroupTasks) -> Result<(), DeviceError> {
        let chunks = self.shape.inputs.div_ceil(CHUNK);
        let share = |tiling: Tiling| (PACKED_AT_ONCE / tiling.tile(0).1.max(1)).div_ceil(CHUNK);
        let count = |group: Group| {
            let tiling = self.tiling(group);
            tiling.tiles * chunks.div_ceil(share(tiling))
        };
        tasks.run(pool, self.groups, count, |group, task, thread| {
            let work = (self.work)(group, thread);
            let share = share(work.tiling);
            let shares = chunks.div_ceil(share);
            let (tile, first) = (task / shares, task % shares * share);
            self.path.run_int8(PackTile { work, tile, chunks: (first, chunks.min(first + share)) });
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
struct Block<'a, K> {
    work: Work<'a, K>,
    panels: (usize, usize),
    tiles: (usize, usize),
}

impl<K: GroupedProduct> Op for Block<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, panels: (mut first, end), tiles } = self;
        let inputs = work.kernel.shape().inputs;
        // Number of panels whose weights stay in the cache. It is a multiple of `MOST_PANELS`, because reading one
        // panel at a time uses less of the memory's bandwidth than reading four.
        let cached = CACHED_WEIGHTS / work.kernel.panel_bytes(inputs).max(1) / MOST_PANELS * MOST_PANELS;
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
                    for_tile!(S, rows, {
                        if const { R <= K::MOST_ROWS } {
                            s.call(RowTile::<K, R, P> { work, row, first, last, from, to, ahead });
                        } else {
                            unreachable!("a tile of {R} rows");
                        }
                    });
                }
                from = to;
            }
            if let Epilogue::Gated(limit) = work.epilogue {
                self.gate(s, (first, last), limit);
            }
            first = last;
        }
    }
}

impl<K: GroupedProduct> Block<'_, K> {
    /// Applies the gated activation to panels `first .. last`, whose sums are complete and still in a cache.
    #[inline(always)]
    fn gate<S: Simd>(self, s: S, (first, last): (usize, usize), limit: Option<f32>) {
        let Self { work, tiles, .. } = self;
        let gates = work.kernel.shape().outputs / 2;
        for row in work.tiling.end(tiles.0)..work.tiling.end(tiles.1) {
            for panel in (first..last).step_by(2) {
                let column = panel / 2 * LANES;
                // SAFETY: no other task accesses these rows of these panels, and the two panels differ.
                unsafe {
                    let (gate, up) = (work.sums(row, panel), work.sums(row, panel + 1));
                    let out = work.out.slice_mut(row * gates + column, LANES.min(gates - column));
                    s.call(SiluMul { gate: &gate[..out.len()], up: &up[..out.len()], limit, out });
                }
            }
        }
    }
}

/// The matrix product of a tile (`R` rows from `row` on) and panels `first .. last`, computed `P` panels at a time. The
/// product covers inputs `from .. to`, which are whole groups.
struct RowTile<'a, K, const R: usize, const P: usize> {
    work: Work<'a, K>,
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

impl<K: GroupedProduct, const R: usize, const P: usize> Op for RowTile<'_, K, R, P> {
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

impl<K: GroupedProduct, const R: usize, const P: usize> RowTile<'_, K, R, P> {
    #[inline(always)]
    fn tile<S: Simd, const N: usize>(&self, s: S, panel: usize) {
        let Self { work, row, from, to, ahead, .. } = *self;
        let (kernel, shape) = (work.kernel, work.kernel.shape());
        let bytes = kernel.panel_bytes(shape.inputs);
        let data = &kernel.data()[panel * bytes..(panel + N) * bytes];
        let skipped = kernel.panel_bytes(from);
        let panels: [*const u8; N] = std::array::from_fn(|p| data[p * bytes + skipped..].as_ptr());
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
            let words = row * kernel.row_words(shape.inputs, S::DOT_INPUTS)
                + R * kernel.row_words(from, S::DOT_INPUTS);
            let x = work.activations.as_ptr().add(words).cast_const();
            kernel.add_product::<S, R, N>(s, &mut sums, x, panels, to - from, further);
        }
        let bias = match work.epilogue {
            Epilogue::Set(bias) | Epilogue::Add(bias) if to == shape.inputs => bias,
            _ => None,
        };
        for (r, sums) in sums.iter().enumerate() {
            for (p, &sum) in sums.iter().enumerate() {
                if let (Epilogue::PanelMaxima(maxima, masks), true) = (work.epilogue, to == shape.inputs) {
                    work.store_maximum(s, (maxima, masks), row + r, panel + p, sum);
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
                if let (Epilogue::Largest(partial), true) = (work.epilogue, to == shape.inputs) {
                    let (thread, row, first) = (work.thread, row + r, (panel + p) * LANES);
                    s.call(UpdateArgmax { partial, thread, row, first, logits: out });
                }
            }
        }
    }
}
