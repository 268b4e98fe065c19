//! The arg max, sampling and scoring. The results stay on the device until the end of the step.

mod candidates;
mod tasks;

use self::tasks::{Lists, Request};
use super::CudaDevice;
use crate::cuda::arguments::{self, BestCandidates, PartialArgmax, ScoreTokens};
use crate::cuda::gemm::Accumulate;
use crate::cuda::kernels::Grid;
use crate::cuda::memory::{DevicePointer, grown};
use crate::cuda::records::{Record, ScoreTask};
use crate::cuda::results::{Block, Kind};
use crate::cuda::sources::kernel;
use crate::cuda::tensor::{Matrix, Tensor, Vector};
use crate::device::sampler_preconditions as check;
use crate::{Argmax, DeviceError, GatheredRows, Nomination, SampleRow, Sampler, ScoreRow};

/// Threads per block. A thread block computes one row of logits.
const THREADS: u32 = 256;
/// Maximum size in bytes of each of the three scratch arrays of sampling. At least one row is sampled per launch, even
/// if it needs more. Rows that do not fit are sampled by further launches.
const SCRATCH_BYTES: usize = 32 << 20;

impl Sampler for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn argmax(&mut self, argmax: Argmax<'_, Tensor, Matrix, Vector>) -> Result<(), DeviceError> {
        let logits = self.logits_of(argmax)?;
        let block = Block::new(&mut self.results.staging, vec![None; logits.live], Kind::Sampled)?;
        let operands = arguments::Argmax {
            logits: logits.at(),
            width: logits.width as u32,
            slots: self.slots_of(logits),
            last_tokens: self.last_tokens.at(),
            results: block.results_at(),
        };
        self.kernels.launch(kernel::argmax, Grid::of(logits.live, THREADS), operands)?;
        self.results.push(block)
    }

    fn partial_argmax(
        &mut self,
        argmax: Argmax<'_, Tensor, Matrix, Vector>,
        first: usize,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        out.written_like(argmax.x, 2)?;
        let logits = self.logits_of(argmax)?;
        let (width, first) = (logits.width as u32, first as u32);
        let operands = PartialArgmax { logits: logits.at(), width, first, out: out.at() };
        self.kernels.launch(kernel::partial_argmax, Grid::of(logits.live, THREADS), operands)
    }

    fn best_candidates(&mut self, candidates: &Tensor) -> Result<(), DeviceError> {
        let width = candidates.width;
        check::candidates(width)?;
        let rows = candidates.live;
        let block = Block::new(&mut self.results.staging, vec![None; rows], Kind::Sampled)?;
        let operands = BestCandidates {
            candidates: candidates.at(),
            count: (width / 2) as u32,
            rows: rows as u32,
            slots: self.slots_of(candidates),
            last_tokens: self.last_tokens.at(),
            results: block.results_at(),
        };
        self.kernels.launch(kernel::best_candidates, Grid::over(rows, 32), operands)?;
        self.results.push(block)
    }

    fn adjust(
        &mut self,
        logits: &mut Tensor,
        rows: &[(usize, &Nomination)],
        first: usize,
        peaks: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.adjust_shard(logits, rows, first, peaks)
    }

    fn nominate(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, &Nomination)],
        first: usize,
        peaks: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        self.nominate_shard(logits, rows, first, peaks, out)
    }

    fn sample_gathered(
        &mut self,
        gathered: GatheredRows<'_, Tensor>,
        rows: &[(usize, SampleRow<'_>)],
    ) -> Result<(), DeviceError> {
        self.sample_rows(gathered, rows)
    }

    fn sample(&mut self, logits: &Tensor, rows: &[(usize, SampleRow<'_>)]) -> Result<(), DeviceError> {
        let owner_of = |index| self.step.owner(logits.first_logit_row + index);
        let (requests, tops) = tasks::requests(rows, logits.width, owner_of)?;
        let block = Block::new(&mut self.results.staging, tops, Kind::Sampled)?;
        self.sample_whole(logits, &requests, &block)?;
        self.results.push(block)
    }

    fn score(&mut self, logits: &Tensor, rows: &[(usize, ScoreRow)]) -> Result<(), DeviceError> {
        let (mut words, mut tops, mut first_top) =
            (Vec::with_capacity(rows.len() * ScoreTask::WORDS), Vec::new(), 0);
        for &(index, ScoreRow { token, top }) in rows {
            check::logit_row(index, logits.live)?;
            check::scored_token(token, logits.width)?;
            let count = (top as usize).min(logits.width);
            let task = ScoreTask { row: index as u32, token, tops: count as u32, first_top };
            words.extend_from_slice(task.words());
            first_top += count as u32;
            tops.push(Some(count));
        }
        let tasks = self.inputs.upload(&words)?;
        let block = Block::new(&mut self.results.staging, tops, Kind::Scores)?;
        let operands = ScoreTokens {
            logits: logits.at(),
            width: logits.width as u32,
            tasks: tasks.cast(),
            results: block.results_at(),
            tops: block.tops_at(),
        };
        self.kernels.launch(kernel::score_tokens, Grid::of(rows.len(), THREADS), operands)?;
        self.results.push(block)
    }
}

impl CudaDevice {
    /// Enqueues the matrix product that computes the logits of an arg max. Returns the logits.
    fn logits_of<'a>(
        &mut self,
        argmax: Argmax<'a, Tensor, Matrix, Vector>,
    ) -> Result<&'a Tensor, DeviceError> {
        let Argmax { x, norm, weight, logits, allowed } = argmax;
        check::no_masks(allowed.len())?;
        logits.written_like(x, weight.plain_outputs()?)?;
        self.product(x, norm, weight, Accumulate::Set, logits.at())?;
        Ok(logits)
    }

    /// Returns the address of the slots of a tensor's rows; null if the rows are not logit rows of the step.
    fn slots_of(&self, x: &Tensor) -> DevicePointer<u32> {
        match x.first_logit_row + x.live <= self.step.owners.len() {
            true => self.step.at.logit_slots.add(x.first_logit_row),
            false => DevicePointer::NULL,
        }
    }

    /// Enqueues the sampling of rows from their complete logits. The results go to `block`.
    fn sample_whole(
        &mut self,
        logits: &Tensor,
        requests: &[Request<'_>],
        block: &Block,
    ) -> Result<(), DeviceError> {
        requests.iter().try_for_each(|request| check::logit_row(request.index, logits.live))?;
        let row_bytes = logits.width * size_of::<f32>();
        let at_once = (SCRATCH_BYTES / row_bytes.max(1)).clamp(1, logits.capacity.max(1));
        let what = "scratch memory of sampling";
        for requests in requests.chunks(at_once) {
            let bytes = at_once * row_bytes;
            let adjusted = grown(&mut self.scratch.adjusted, &self.gpu, bytes, what)?.at();
            let weights = grown(&mut self.scratch.weights, &self.gpu, bytes, what)?.at();
            let counts = grown(&mut self.scratch.counts, &self.gpu, bytes, what)?.at();
            let list = self.inputs.upload(&tasks::words(requests, Lists::OfAdjustments))?;
            let operands = arguments::Sample {
                logits: logits.at(),
                width: logits.width as u32,
                tasks: list.cast(),
                words: list,
                adjusted,
                weights,
                counts,
                last_tokens: self.last_tokens.at(),
                results: block.results_at(),
                tops: block.tops_at(),
            };
            self.kernels.launch(kernel::sample, Grid::of(requests.len(), THREADS), operands)?;
        }
        Ok(())
    }
}
