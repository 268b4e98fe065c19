//! Matrix products, the arg max and sampling: dispatch to the kernels of the weights' form.

use super::CpuDevice;
use crate::cpu::gemm::input::Input;
use crate::cpu::gemm::{self, Epilogue};
use crate::cpu::memory::Shared;
use crate::cpu::memory::tensor::{Tensor, Vector};
use crate::cpu::memory::weights::Weights;
use crate::cpu::quant::int8;
use crate::cpu::sampling::{argmax, sample};
use crate::cpu::simd::isa::Path;
use crate::{DeviceError, Norm, Sampled};

impl CpuDevice {
    /// Computes a product of `x`, which is normalised first if there is a norm.
    pub(super) fn product(
        &mut self,
        x: &Tensor,
        norm: Option<Norm<'_, Vector>>,
        weight: &Weights,
        epilogue: Epilogue<'_>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let rows = x.live();
        let norm = norm.map(|norm| Ok::<_, DeviceError>((norm.weight.read(weight.inputs())?, norm.eps)));
        let x = Input { values: x.read(weight.inputs())?, norm: norm.transpose()? };
        let (path, pool) = (self.path, &mut self.pool);
        match weight {
            Weights::Stored(matrix) => {
                gemm::linear(path, pool, &mut self.products, gemm::Product { x, rows, matrix, epilogue, out })
            }
            Weights::Int8(matrix) => {
                int8::linear(path, pool, &mut self.int8, int8::Product { x, rows, matrix, epilogue, out })
            }
        }
    }

    /// Calls `f` for each entry of `rows`, in parallel, with the row of logits at the entry's index. Appends the
    /// results to `out` in order.
    pub(super) fn each_logit_row<R, T>(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, R)],
        out: &mut Vec<T>,
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
        for result in results.into_iter().flatten() {
            out.push(result?);
        }
        Ok(())
    }

    /// Appends the likeliest token of each row to `out`. `logits` is scratch memory.
    pub(super) fn likeliest(
        &mut self,
        x: &Tensor,
        norm: Norm<'_, Vector>,
        weight: &Weights,
        logits: &mut [f32],
        out: &mut Vec<Sampled>,
    ) -> Result<(), DeviceError> {
        let mut best = std::mem::take(&mut self.best);
        argmax::clear(&mut best, self.pool.threads(), x.live());
        let shared = Shared::new(&mut best);
        let epilogue = Epilogue::Largest(argmax::PartialArgmax::new(&shared, x.live()));
        self.product(x, Some(norm), weight, epilogue, logits)?;
        self.best = best;
        argmax::decide(&self.best, x.live(), out)
    }
}
