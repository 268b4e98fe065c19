//! The arg max, sampling and scores. Their results wait on the device for the end of the step.

use super::CudaDevice;
use crate::cuda::gemm::Accumulate;
use crate::cuda::kernels::{Grid, arguments};
use crate::cuda::memory::grown;
use crate::cuda::results::{Block, Kind};
use crate::cuda::step::Owner;
use crate::cuda::tensor::{Matrix, Tensor, Vector};
use crate::{Argmax, DeviceError, SampleRow, Sampler, ScoreRow};

/// Threads of a block, which works on one row of logits.
const THREADS: u32 = 256;
/// Upper bound of the bytes of each of the three scratch arrays of sampling, unless one row takes more: rows beyond it are
/// sampled by further launches.
const SCRATCH_BYTES: usize = 32 << 20;
/// Words of `Task` in `sources/sample.cu`.
const TASK_WORDS: usize = 26;

impl Sampler for CudaDevice {
    fn argmax(&mut self, argmax: Argmax<'_, Tensor, Matrix, Vector>) -> Result<(), DeviceError> {
        let logits = self.logits_of(argmax)?;
        let block = Block::new(&mut self.results.staging, vec![None; logits.live], Kind::Sampled)?;
        let (slots, last) = (self.slots_of(logits), self.last_tokens.at());
        let operands = arguments![logits.at(), logits.width as u32, slots, last, block.results_at()];
        self.kernels.launch("argmax", Grid::of(logits.live, THREADS), operands)?;
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
        let operands = arguments![logits.at(), logits.width as u32, first as u32, out.at()];
        self.kernels.launch("partial_argmax", Grid::of(logits.live, THREADS), operands)
    }

    fn best_candidates(&mut self, candidates: &Tensor) -> Result<(), DeviceError> {
        let width = candidates.width;
        if width < 2 || !width.is_multiple_of(2) {
            return Err(DeviceError::Misuse(format!("candidates of {width} numbers")));
        }
        let rows = candidates.live;
        let block = Block::new(&mut self.results.staging, vec![None; rows], Kind::Sampled)?;
        let (slots, last) = (self.slots_of(candidates), self.last_tokens.at());
        let operands =
            arguments![candidates.at(), (width / 2) as u32, rows as u32, slots, last, block.results_at()];
        self.kernels.launch("best_candidates", Grid::over(rows, 32), operands)?;
        self.results.push(block)
    }

    fn sample(&mut self, logits: &Tensor, rows: &[(usize, SampleRow<'_>)]) -> Result<(), DeviceError> {
        let row_bytes = logits.width * size_of::<f32>();
        let at_once = (SCRATCH_BYTES / row_bytes.max(1)).clamp(1, logits.capacity.max(1));
        for rows in rows.chunks(at_once) {
            self.sample_at_once(logits, rows, at_once * row_bytes)?;
        }
        Ok(())
    }

    fn score(&mut self, logits: &Tensor, rows: &[(usize, ScoreRow)]) -> Result<(), DeviceError> {
        let (mut words, mut tops, mut first_top) = (Vec::with_capacity(rows.len() * 4), Vec::new(), 0);
        for &(index, ScoreRow { token, top }) in rows {
            check_row(logits, index)?;
            if token as usize >= logits.width {
                return Err(DeviceError::Misuse(format!("token {token} of {} logits", logits.width)));
            }
            let count = (top as usize).min(logits.width);
            words.extend([index as u32, token, count as u32, first_top]);
            first_top += count as u32;
            tops.push(Some(count));
        }
        let tasks = self.inputs.upload(&words)?;
        let block = Block::new(&mut self.results.staging, tops, Kind::Scores)?;
        let operands =
            arguments![logits.at(), logits.width as u32, tasks, block.results_at(), block.tops_at()];
        self.kernels.launch("score_tokens", Grid::of(rows.len(), THREADS), operands)?;
        self.results.push(block)
    }
}

impl CudaDevice {
    /// Enqueues the product of an arg max, and returns its logits.
    fn logits_of<'a>(
        &mut self,
        argmax: Argmax<'a, Tensor, Matrix, Vector>,
    ) -> Result<&'a Tensor, DeviceError> {
        let Argmax { x, norm, weight, logits } = argmax;
        logits.written_like(x, weight.plain_outputs()?)?;
        self.product(x, norm, weight, Accumulate::Set, logits.at())?;
        Ok(logits)
    }

    /// Address of the slots of a tensor's logit rows; 0 if they are no logit rows of the step.
    fn slots_of(&self, x: &Tensor) -> u64 {
        match x.first_logit_row + x.live <= self.step.owners.len() {
            true => self.step.at.logit_slots + 4 * x.first_logit_row as u64,
            false => 0,
        }
    }

    fn sample_at_once(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, SampleRow<'_>)],
        scratch_bytes: usize,
    ) -> Result<(), DeviceError> {
        let mut tasks = Tasks { words: vec![0; rows.len() * TASK_WORDS], tops: Vec::new(), first_top: 0 };
        for (task, (index, row)) in rows.iter().enumerate() {
            check_row(logits, *index)?;
            let owner = self.step.owners.get(logits.first_logit_row + index).copied().unwrap_or_default();
            tasks.push(task, *index, row, owner, logits.width)?;
        }
        let what = "scratch memory of sampling";
        let adjusted = grown(&mut self.scratch.adjusted, &self.gpu, scratch_bytes, what)?.at();
        let weights = grown(&mut self.scratch.weights, &self.gpu, scratch_bytes, what)?.at();
        let counts = grown(&mut self.scratch.counts, &self.gpu, scratch_bytes, what)?.at();
        let list = self.inputs.upload(&tasks.words)?;
        let block = Block::new(&mut self.results.staging, tasks.tops, Kind::Sampled)?;
        let operands = arguments![
            logits.at(),
            logits.width as u32,
            list,
            list,
            adjusted,
            weights,
            counts,
            self.last_tokens.at(),
            block.results_at(),
            block.tops_at(),
        ];
        self.kernels.launch("sample", Grid::of(rows.len(), THREADS), operands)?;
        self.results.push(block)
    }
}

/// The tasks of one launch, and behind them their lists of tokens.
struct Tasks {
    words: Vec<u32>,
    tops: Vec<Option<usize>>,
    first_top: u32,
}

impl Tasks {
    fn push(
        &mut self,
        task: usize,
        index: usize,
        row: &SampleRow<'_>,
        owner: Owner,
        vocabulary: usize,
    ) -> Result<(), DeviceError> {
        let params = row.params;
        let penalises = params.repetition_penalty != 1.0
            || params.presence_penalty != 0.0
            || params.frequency_penalty != 0.0;
        let biased = params.logit_bias.iter().map(|(token, _)| token).chain(row.forbidden);
        let seen = row.prompt.iter().chain(row.output).take(if row.adjusts() { usize::MAX } else { 0 });
        if let Some(token) = biased.chain(seen).find(|&&token| token as usize >= vocabulary) {
            return Err(DeviceError::Misuse(format!("token {token} of a vocabulary of {vocabulary}")));
        }
        let history = |tokens| if penalises { tokens } else { &[][..] };
        let bias = self.words.len() as u32;
        let pairs = params.logit_bias.iter();
        self.words.extend(pairs.flat_map(|&(token, bias)| [token, bias.to_bits()]));
        let forbidden = self.list(row.forbidden);
        let prompt = self.list(history(row.prompt));
        let output = self.list(history(row.output));
        let tops = row.logprobs.map(|top| (top as usize).min(vocabulary));
        let count = tops.unwrap_or(0) as u32;
        let words = [
            params.seed as u32,
            (params.seed >> 32) as u32,
            row.position as u32,
            (row.position >> 32) as u32,
            index as u32,
            owner.slot,
            u32::from(owner.continues && penalises),
            u32::from(tops.is_some()),
            params.temperature.to_bits(),
            params.min_p.to_bits(),
            params.top_p.to_bits(),
            params.repetition_penalty.to_bits(),
            params.presence_penalty.to_bits(),
            params.frequency_penalty.to_bits(),
            params.top_k,
            count,
            self.first_top,
            bias,
            params.logit_bias.len() as u32,
            forbidden,
            row.forbidden.len() as u32,
            prompt,
            history(row.prompt).len() as u32,
            output,
            history(row.output).len() as u32,
            u32::from(row.adjusts()),
        ];
        self.words[task * TASK_WORDS..][..TASK_WORDS].copy_from_slice(&words);
        self.first_top += count;
        self.tops.push(tops);
        Ok(())
    }

    /// Appends a list, and returns the index of its first word.
    fn list(&mut self, tokens: &[u32]) -> u32 {
        let first = self.words.len() as u32;
        self.words.extend_from_slice(tokens);
        first
    }
}

fn check_row(logits: &Tensor, index: usize) -> Result<(), DeviceError> {
    if index < logits.live {
        return Ok(());
    }
    Err(DeviceError::Misuse(format!("row {index} of {} rows of logits", logits.live)))
}
