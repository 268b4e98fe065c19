//! The arg max of each row over a few candidate panels: the exact phase of a screened LM head (see
//! [`crate::cpu::sampling::screen`]).
//!
//! Each row is a tile of its own. The order of additions is the same in every tile, so a logit has the same bits as in
//! the product of all panels.

use super::epilogue::Epilogue;
use super::micro_kernel::{BlockFloat, Data, Dots, MicroKernel, Widened};
use super::scratch::Scratch;
use super::work::Work;
use crate::DeviceError;
use crate::cpu::gemm::activations::PackActivations;
use crate::cpu::gemm::groups::Group;
use crate::cpu::gemm::input::Input;
use crate::cpu::gemm::tile::{TileLimits, Tiling, prefetch};
use crate::cpu::memory::Shared;
use crate::cpu::memory::format::{F16, F32, STEP, Stored};
use crate::cpu::memory::matrix::{Elements, Matrix};
use crate::cpu::sampling::argmax::PartialArgmax;
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{Op, Simd};
use crate::cpu::threads::pool::ThreadPool;

/// A panel that can hold a row's largest logit. Candidates are ordered by panel, so that a panel is read from memory
/// once for all of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::cpu) struct Candidate {
    pub(in crate::cpu) panel: u32,
    pub(in crate::cpu) row: u32,
}

/// Maximum number of candidates per task. A candidate takes about a microsecond.
const TASK_CANDIDATES: usize = 8;
/// Minimum number of tasks per thread, if there are enough candidates.
const TASKS: usize = 4;
/// Prefetch distance in lines.
const AHEAD: usize = 64;

/// Updates the arg max of `rows` rows with the logits of the candidates. `scratch` must have room for the rows.
pub(in crate::cpu) fn find_largest(
    path: Path,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    (x, rows): (Input<'_>, usize),
    (matrix, candidates): (&Matrix, &[Candidate]),
    partial: PartialArgmax<'_>,
) -> Result<(), DeviceError> {
    let exact = Exact { path, x, rows, matrix, candidates, partial };
    match &matrix.data {
        Elements::Stored(Stored::F32(_)) => exact.multiply::<Widened<F32>>(pool, scratch),
        Elements::Stored(Stored::F16(_)) => exact.multiply::<Widened<F16>>(pool, scratch),
        Elements::Stored(Stored::Bf16(_)) => exact.multiply::<Dots>(pool, scratch),
        Elements::BlockFloat(_) => exact.multiply::<BlockFloat>(pool, scratch),
    }
}

/// The operands of [`find_largest`].
struct Exact<'a> {
    path: Path,
    x: Input<'a>,
    rows: usize,
    matrix: &'a Matrix,
    candidates: &'a [Candidate],
    partial: PartialArgmax<'a>,
}

impl Exact<'_> {
    fn multiply<K: MicroKernel>(
        &self,
        pool: &mut ThreadPool,
        scratch: &mut Scratch,
    ) -> Result<(), DeviceError> {
        let Self { path, x, rows, matrix, candidates, partial } = *self;
        let Some(elements) = K::elements(&matrix.data) else { unreachable!("weights of another kind") };
        let Scratch { activations, tasks, .. } = scratch;
        let activations = Shared::new(&mut activations[..]);
        let groups = &[Group::whole(rows)];
        let pack = PackActivations {
            x,
            inputs: matrix.shape.inputs,
            groups,
            limits: TileLimits { several: 1, single: 1 },
        };
        pack.run::<K>(path, (pool, tasks), &activations)?;

        let share = candidates.len().div_ceil(TASKS * pool.threads()).clamp(1, TASK_CANDIDATES);
        let data = Data { elements, steps: matrix.shape.steps() };
        let out = Shared::new(&mut []);
        pool.run(candidates.len().div_ceil(share), |task, thread| {
            let work = Work {
                tiling: Tiling::new(rows, 1),
                activations: &activations,
                matrix,
                epilogue: Epilogue::Largest(partial),
                out: &out,
                thread,
            };
            let of_task = task * share..candidates.len().min((task + 1) * share);
            K::run(path, Task::<K> { work, data, candidates: &candidates[of_task] });
        })
    }
}

/// One task: the logits of some candidates (pairs of panel and row).
struct Task<'a, K: MicroKernel> {
    work: Work<'a>,
    data: Data<'a, K>,
    candidates: &'a [Candidate],
}

impl<K: MicroKernel> Op for Task<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { work, data, candidates } = self;
        let (steps, lines) = (data.steps, K::lines(data.steps));
        for (index, &Candidate { panel, row }) in candidates.iter().enumerate() {
            let (panel, row) = (panel as usize, row as usize);
            let elements = data.steps(panel, 0, steps);
            // After a panel's last line, the first line of the next candidate's panel is prefetched.
            let next = candidates.get(index + 1).map_or(panel, |next| next.panel as usize);
            let next = data.address(next, 0).cast::<K::Raw>();
            let ask = |_: usize, line: usize| {
                let (from, line) = if line + AHEAD < lines {
                    (elements, line + AHEAD)
                } else {
                    (next, line + AHEAD - lines)
                };
                prefetch(s, from.wrapping_add(line * STEP), STEP);
            };
            // SAFETY: `row` is a tile of the packed activations. They hold `2 * steps` inputs of the row, and no task
            // writes to them now. [`Data::steps`] has checked that the panel holds `steps` steps.
            let [[sum]] = unsafe {
                let x = work.inputs::<K, 1>(row, 0);
                K::multiply::<S, 1, 1>(s, [[s.splat(0.0)]], x, [elements], steps, ask)
            };
            work.finish(s, row, panel, sum);
        }
    }
}
