//! The arg max, sampling and scoring. These operations run when they are enqueued, and their results are kept until the
//! step is collected.

use super::CpuDevice;
use super::dense::input;
use crate::cpu::gemm::Epilogue;
use crate::cpu::memory::{Shared, Tensor, Vector, Weights};
use crate::cpu::sampling::mask::RowMasks;
use crate::cpu::sampling::screen::Operands;
use crate::cpu::sampling::{argmax, logits, nominate, sample};
use crate::cpu::simd::isa::Path;
use crate::device::sampler_preconditions as check;
use crate::{Argmax, DeviceError, GatheredRows, Nomination, SampleRow, Sampler, ScoreRow};

impl Sampler for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn argmax(&mut self, argmax: Argmax<'_, Tensor, Weights, Vector>) -> Result<(), DeviceError> {
        let masks = RowMasks(argmax.allowed);
        let vocabulary = argmax.weight.plain_outputs()?;
        let rows = self.find_largest(argmax)?;
        let token = |row| {
            let mask = masks.of(row);
            mask.map_or(Ok(()), |mask| check::mask(mask, vocabulary))?;
            argmax::merged(&self.best, rows, row).token(mask.is_some())
        };
        self.results.sampled.extend((0..rows).map(token));
        Ok(())
    }

    fn partial_argmax(
        &mut self,
        argmax: Argmax<'_, Tensor, Weights, Vector>,
        first: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let rows = argmax.x.live();
        check::no_masks(argmax.allowed.len())?;
        let out = out.written(rows, 2)?;
        self.find_largest(argmax)?;
        for (row, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *out = argmax::merged(&self.best, rows, row).candidate(first);
        }
        Ok(())
    }

    fn best_candidates(&mut self, candidates: &Tensor) -> Result<(), DeviceError> {
        check::candidates(candidates.width())?;
        for row in candidates.values().chunks_exact(candidates.width()) {
            self.results.sampled.push(argmax::best_of(row.as_chunks().0).token(false));
        }
        Ok(())
    }

    fn adjust(
        &mut self,
        logits: &mut Tensor,
        rows: &[(usize, &Nomination)],
        first: usize,
        peaks: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (live, width, path) = (logits.live(), logits.width(), self.path);
        check::nominated_rows(rows, live)?;
        let peaks = peaks.written(live, 2)?;
        // The peaks (largest logits) of rows without a nomination are zero, so that every entry is defined.
        peaks.fill(0.0);
        let (logits, peaks) = (Shared::new(logits.values_mut()), Shared::new(peaks));
        self.pool.run(rows.len(), |task, _| {
            let (row, nomination) = rows[task];
            // SAFETY: the row indices ascend, so no two tasks access the same row.
            let (logits, peaks) =
                unsafe { (logits.slice_mut(row * width, width), peaks.slice_mut(2 * row, 2)) };
            peaks.copy_from_slice(&nominate::adjust(path, logits, nomination, first));
        })
    }

    fn nominate(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, &Nomination)],
        first: usize,
        peaks: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (live, tokens, width, path) = (logits.live(), logits.width(), out.width(), self.path);
        check::nominated_rows(rows, live)?;
        check::nominated_tokens(rows, tokens, width)?;
        check::peaks([peaks.live(), peaks.width()], live)?;
        let (values, peaks) = (logits.values(), peaks.values().as_chunks::<2>().0);
        let (out, scratch) = (Shared::new(out.written(live, width)?), Shared::new(&mut self.sampling));
        self.pool.run(rows.len(), |task, thread| {
            let (row, nomination) = rows[task];
            // SAFETY: the row indices ascend, so no two tasks access the same row. Each thread accesses only its own
            // scratch and runs one task at a time.
            let (out, scratch) =
                unsafe { (out.slice_mut(row * width, width), &mut scratch.slice_mut(thread, 1)[0]) };
            let (logits, place) = (&values[row * tokens..][..tokens], (first, peaks[row]));
            nominate::nominate(path, logits, nomination, place, scratch, out.as_chunks_mut().0);
        })
    }

    fn sample(&mut self, logits: &Tensor, rows: &[(usize, SampleRow<'_>)]) -> Result<(), DeviceError> {
        let mut results = std::mem::take(&mut self.results.sampled);
        let outcome = self.each_logit_row(logits, rows, &mut results, |path, logits, row, scratch| {
            sample::sample(path, logits, row, scratch)
        });
        self.results.sampled = results;
        outcome
    }

    fn sample_gathered(
        &mut self,
        gathered: GatheredRows<'_, Tensor>,
        rows: &[(usize, SampleRow<'_>)],
    ) -> Result<(), DeviceError> {
        let GatheredRows { logits, candidates, peaks, nominated } = gathered;
        let (vocabulary, width, all) = (logits.width(), candidates.width(), candidates.values());
        check::gathered([candidates.live(), width], nominated)?;
        check::peaks([peaks.live(), peaks.width()], candidates.live())?;
        let peaks = peaks.values().as_chunks::<2>().0;
        let mut results = std::mem::take(&mut self.results.sampled);
        let outcome = self.each_row(rows, &mut results, |path, (index, row), scratch| {
            if nominated.binary_search(index).is_ok() {
                let candidates = all[index * width..][..width].as_chunks().0;
                return nominate::sample(path, candidates, (vocabulary, peaks[*index]), row, scratch);
            }
            sample::sample(path, logit_row(logits, *index)?, row, scratch)
        });
        self.results.sampled = results;
        outcome
    }

    fn score(&mut self, logits: &Tensor, rows: &[(usize, ScoreRow)]) -> Result<(), DeviceError> {
        let mut results = std::mem::take(&mut self.results.scores);
        let outcome = self.each_logit_row(logits, rows, &mut results, |path, logits, row, _| {
            logits::score(path, logits, row.token, row.top)
        });
        self.results.scores = results;
        outcome
    }
}

impl CpuDevice {
    /// Multiplies `x` by the LM head. Finds, for each row and each thread, the allowed token with the largest logit
    /// among those that the thread computes. Returns the number of rows.
    fn find_largest(&mut self, argmax: Argmax<'_, Tensor, Weights, Vector>) -> Result<usize, DeviceError> {
        let Argmax { x, norm, weight, logits, allowed } = argmax;
        let (rows, capacity, masks) = (x.live(), logits.capacity(), RowMasks(allowed));
        check::masks(allowed.len(), rows)?;
        let logits = logits.written(rows, weight.plain_outputs()?)?;
        let mut best = std::mem::take(&mut self.best);
        argmax::clear(&mut best, self.pool.threads(), rows);
        let shared = Shared::new(&mut best);
        let partial = argmax::PartialArgmax::new(&shared, rows, masks);
        let screened = match weight {
            Weights::Stored(matrix) => {
                let Self { path, pool, quantised, products, screening, .. } = self;
                let (path, x, logits) = (*path, input(x, norm.as_ref(), weight.inputs())?, &mut *logits);
                screening.fit(capacity, matrix);
                screening.find_largest(Operands {
                    path,
                    pool,
                    int8: quantised,
                    products,
                    x,
                    rows,
                    matrix,
                    masks,
                    partial,
                    logits,
                })?
            }
            Weights::Int8(_) | Weights::Grouped(_) => false,
        };
        if !screened {
            self.product(x, norm, weight, Epilogue::Largest(partial), logits)?;
        }
        self.best = best;
        Ok(rows)
    }

    /// Calls `f` for each entry of `rows`, in parallel, with the row of logits at the entry's index: see
    /// [`each_row`](Self::each_row).
    fn each_logit_row<R, T>(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, R)],
        out: &mut Vec<Result<T, DeviceError>>,
        f: impl Fn(Path, &[f32], &R, &mut sample::Scratch) -> Result<T, DeviceError> + Sync,
    ) -> Result<(), DeviceError>
    where
        R: Sync,
        T: Send,
    {
        self.each_row(rows, out, |path, (index, row), scratch| {
            f(path, logit_row(logits, *index)?, row, scratch)
        })
    }

    /// Calls `f` for each entry of `rows`, in parallel. Appends the results to `out` in order. If the device is lost
    /// during a call, appends nothing.
    fn each_row<R, T>(
        &mut self,
        rows: &[(usize, R)],
        out: &mut Vec<Result<T, DeviceError>>,
        f: impl Fn(Path, &(usize, R), &mut sample::Scratch) -> Result<T, DeviceError> + Sync,
    ) -> Result<(), DeviceError>
    where
        R: Sync,
        T: Send,
    {
        let path = self.path;
        let mut results: Vec<Option<Result<T, DeviceError>>> = rows.iter().map(|_| None).collect();
        let (results_, scratch) = (Shared::new(&mut results), Shared::new(&mut self.sampling));
        self.pool.run(rows.len(), |task, thread| {
            // SAFETY: each thread accesses only its own scratch and runs one task at a time. Each task accesses only
            // its own result.
            let (result, scratch) =
                unsafe { (&mut results_.slice_mut(task, 1)[0], &mut scratch.slice_mut(thread, 1)[0]) };
            *result = Some(f(path, &rows[task], scratch));
        })?;
        if let Some(lost) = results.iter().flatten().find_map(|result| match result {
            Err(lost @ DeviceError::Lost(_)) => Some(lost.clone()),
            _ => None,
        }) {
            return Err(lost);
        }
        out.extend(results.into_iter().flatten());
        Ok(())
    }
}

/// Returns a row of logits.
fn logit_row(logits: &Tensor, index: usize) -> Result<&[f32], DeviceError> {
    check::logit_row(index, logits.live())?;
    let width = logits.width();
    Ok(&logits.values()[index * width..][..width])
}
