//! The arg max, sampling and scores. They run when they are enqueued, and their results wait for the collection.

use super::CpuDevice;
use crate::cpu::gemm::Epilogue;
use crate::cpu::memory::{Shared, Tensor, Vector, Weights};
use crate::cpu::sampling::{argmax, logits, sample};
use crate::cpu::simd::isa::Path;
use crate::{Argmax, DeviceError, SampleRow, Sampler, ScoreRow};

impl Sampler for CpuDevice {
    fn argmax(&mut self, argmax: Argmax<'_, Tensor, Weights, Vector>) -> Result<(), DeviceError> {
        let rows = self.find_largest(argmax)?;
        (0..rows).try_for_each(|row| {
            self.results.sampled.push(Ok(argmax::merged(&self.best, rows, row).token()?));
            Ok(())
        })
    }

    fn partial_argmax(
        &mut self,
        argmax: Argmax<'_, Tensor, Weights, Vector>,
        first: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let rows = argmax.x.live();
        let out = out.written(rows, 2)?;
        self.find_largest(argmax)?;
        for (row, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            *out = argmax::merged(&self.best, rows, row).candidate(first);
        }
        Ok(())
    }

    fn best_candidates(&mut self, candidates: &Tensor) -> Result<(), DeviceError> {
        if candidates.width() < 2 || !candidates.width().is_multiple_of(2) {
            let width = candidates.width();
            return Err(DeviceError::Misuse(format!("candidates of {width} numbers")));
        }
        for row in candidates.values().chunks_exact(candidates.width()) {
            self.results.sampled.push(Ok(argmax::best_of(row.as_chunks().0).token()?));
        }
        Ok(())
    }

    fn sample(&mut self, logits: &Tensor, rows: &[(usize, SampleRow<'_>)]) -> Result<(), DeviceError> {
        let mut results = std::mem::take(&mut self.results.sampled);
        let outcome = self.each_logit_row(logits, rows, &mut results, |path, logits, row, scratch| {
            sample::sample(path, logits, row, scratch)
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
    /// Finds each thread's best token of each row of a product, and returns the number of rows.
    fn find_largest(&mut self, argmax: Argmax<'_, Tensor, Weights, Vector>) -> Result<usize, DeviceError> {
        let Argmax { x, norm, weight, logits } = argmax;
        let (rows, logits) = (x.live(), logits.written(x.live(), weight.plain_outputs()?)?);
        let mut best = std::mem::take(&mut self.best);
        argmax::clear(&mut best, self.pool.threads(), rows);
        let shared = Shared::new(&mut best);
        let epilogue = Epilogue::Largest(argmax::PartialArgmax::new(&shared, rows));
        self.product(x, norm, weight, epilogue, logits)?;
        self.best = best;
        Ok(rows)
    }

    /// Calls `f` for each entry of `rows`, in parallel, with the row of logits at the entry's index. Appends the
    /// results to `out` in order. If a row loses the device, appends nothing.
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
        let (values, width, path) = (logits.values(), logits.width(), self.path);
        let mut results: Vec<Option<Result<T, DeviceError>>> = rows.iter().map(|_| None).collect();
        let (results_, scratch) = (Shared::new(&mut results), Shared::new(&mut self.sampling));
        self.pool.run(rows.len(), |task, thread| {
            let (index, row) = &rows[task];
            // SAFETY: each thread has its own scratch and runs one task at a time. Each task has its own result.
            let (result, scratch) =
                unsafe { (&mut results_.slice_mut(task, 1)[0], &mut scratch.slice_mut(thread, 1)[0]) };
            *result = Some(match values.get(index * width..(index + 1) * width) {
                Some(logits) => f(path, logits, row, scratch),
                None => Err(DeviceError::Misuse(format!("row {index} of {} rows of logits", logits.live()))),
            });
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
