//! Sampling of rows in a TP group from the best tokens of each rank: see `sources/nominate.cu`.

use super::tasks::{self, Lists, Masks, Request};
use super::{CudaDevice, SCRATCH_BYTES, THREADS};
use crate::cuda::arguments::{self, AdjustShard, MergeNominated, MergePeaks};
use crate::cuda::kernels::Grid;
use crate::cuda::memory::grown;
use crate::cuda::records::{NominationTask, Record};
use crate::cuda::results::{Block, Kind};
use crate::cuda::sources::kernel;
use crate::cuda::tensor::Tensor;
use crate::device::sampler_preconditions as check;
use crate::{DeviceError, GatheredRows, MAX_NOMINATED, Nomination, SampleRow};

/// Width of a slice of a row of logits, as far as [`MOST_SLICES`] suffice.
const SLICE: usize = 4096;
const MOST_SLICES: usize = 32;

// A thread of `nominate` holds one nominated token.
const _: () = assert!(MAX_NOMINATED <= THREADS);
// Each slice of a divided row has at least as many tokens as a nomination, even the last one, which is the shortest.
const _: () = assert!(SLICE / 2 - MOST_SLICES >= MAX_NOMINATED as usize);

impl CudaDevice {
    pub(super) fn adjust_shard(
        &mut self,
        logits: &mut Tensor,
        rows: &[(usize, &Nomination)],
        first: usize,
        peaks: &mut Tensor,
    ) -> Result<(), DeviceError> {
        check::nominated_rows(rows, logits.live)?;
        peaks.written_like(logits, 2)?;
        // The peaks (largest logits) of rows without a nomination are zero, so that every entry is defined.
        peaks.data.fill_zeros(0, peaks.elements() * size_of::<f32>())?;
        let tasks = self.inputs.upload(&words(rows, logits.width, Lists::OfAdjustments))?;
        let (width, first, slices) = (logits.width as u32, first as u32, slices_of(logits.width));
        let bytes = logits.capacity * slices * 2 * size_of::<f32>();
        let of_slices = match slices {
            1 => peaks.at(),
            _ => grown(&mut self.scratch.sliced_peaks, &self.gpu, bytes, "the peaks of slices")?.at(),
        };
        let operands = AdjustShard {
            logits: logits.at(),
            width,
            first,
            tasks: tasks.cast(),
            words: tasks,
            peaks: of_slices,
        };
        self.kernels.launch(kernel::adjust_shard, grid(rows.len(), slices), operands)?;
        if slices == 1 {
            return Ok(());
        }
        let (slices, count) = (slices as u32, rows.len() as u32);
        let operands = MergePeaks { of_slices, slices, tasks: tasks.cast(), rows: count, peaks: peaks.at() };
        self.kernels.launch(kernel::merge_peaks, Grid::over(rows.len(), 32), operands)
    }

    pub(super) fn nominate_shard(
        &mut self,
        logits: &Tensor,
        rows: &[(usize, &Nomination)],
        first: usize,
        peaks: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        check::nominated_rows(rows, logits.live)?;
        check::nominated_tokens(rows, logits.width, out.width)?;
        check::peaks([peaks.live, peaks.width], logits.live)?;
        out.written_like(logits, out.width)?;
        // Rows without a nomination are gathered, too, so their entries are cleared.
        out.data.fill_zeros(0, out.elements() * size_of::<f32>())?;
        let tasks = self.inputs.upload(&words(rows, logits.width, Lists::Empty))?;
        let (slices, out_count) = (slices_of(logits.width), (out.width / 2) as u32);
        // The scratch memory has room for the largest nominations, so that it does not grow later.
        let bytes = logits.capacity * slices * 2 * MAX_NOMINATED as usize * size_of::<f32>();
        let of_slices = match slices {
            1 => out.at(),
            _ => grown(&mut self.scratch.sliced_tokens, &self.gpu, bytes, "the best tokens of slices")?.at(),
        };
        let operands = arguments::Nominate {
            logits: logits.at(),
            width: logits.width as u32,
            first: first as u32,
            tasks: tasks.cast(),
            peaks: peaks.at(),
            out_count,
            out: of_slices,
        };
        self.kernels.launch(kernel::nominate, grid(rows.len(), slices), operands)?;
        if slices == 1 {
            return Ok(());
        }
        let operands = MergeNominated {
            of_slices,
            slices: slices as u32,
            tasks: tasks.cast(),
            peaks: peaks.at(),
            out_count,
            out: out.at(),
        };
        self.kernels.launch(kernel::merge_nominated, Grid::of(rows.len(), THREADS), operands)
    }

    pub(super) fn sample_rows(
        &mut self,
        gathered: GatheredRows<'_, Tensor>,
        rows: &[(usize, SampleRow<'_>)],
    ) -> Result<(), DeviceError> {
        let GatheredRows { logits, candidates, peaks, nominated } = gathered;
        check::gathered([candidates.live, candidates.width], nominated)?;
        check::peaks([peaks.live, peaks.width], candidates.live)?;
        let owner_of = |index| self.step.owner(candidates.first_logit_row + index);
        let (requests, tops) = tasks::requests(rows, logits.width, owner_of)?;
        let (drawn, whole): (Vec<Request<'_>>, Vec<_>) =
            requests.iter().partition(|request| nominated.binary_search(&request.index).is_ok());
        if let Some(request) = drawn.iter().find(|request| request.owner.continues && request.penalises()) {
            // A nomination cannot count the token that the step in flight samples.
            return Err(DeviceError::Misuse(format!("row {} is nominated and continues", request.index)));
        }
        // All results go to one [`Block`], in the order of `rows`.
        let block = Block::new(&mut self.results.staging, tops, Kind::Sampled)?;
        self.sample_whole(logits, &whole, &block)?;
        self.sample_candidates(candidates, peaks, &drawn, &block)?;
        self.results.push(block)
    }

    fn sample_candidates(
        &mut self,
        candidates: &Tensor,
        peaks: &Tensor,
        requests: &[Request<'_>],
        block: &Block,
    ) -> Result<(), DeviceError> {
        let row_bytes = candidates.width / 2 * size_of::<f32>();
        let at_once = (SCRATCH_BYTES / row_bytes.max(1)).clamp(1, candidates.capacity.max(1));
        let what = "scratch memory of sampling";
        for requests in requests.chunks(at_once) {
            let bytes = at_once * row_bytes;
            let logits = grown(&mut self.scratch.adjusted, &self.gpu, bytes, what)?.at();
            let weights = grown(&mut self.scratch.weights, &self.gpu, bytes, what)?.at();
            let ids = grown(&mut self.scratch.counts, &self.gpu, bytes, what)?.at();
            let tasks = self.inputs.upload(&tasks::words(requests, Lists::Empty))?;
            let operands = arguments::SampleCandidates {
                candidates: candidates.at(),
                width: (candidates.width / 2) as u32,
                peaks: peaks.at(),
                tasks: tasks.cast(),
                logits,
                weights,
                ids,
                last_tokens: self.last_tokens.at(),
                results: block.results_at(),
            };
            self.kernels.launch(kernel::sample_candidates, Grid::of(requests.len(), THREADS), operands)?;
        }
        Ok(())
    }
}

/// Returns the number of slices into which thread blocks divide a row of logits.
fn slices_of(width: usize) -> usize {
    width.div_ceil(SLICE).clamp(1, MOST_SLICES)
}

/// A grid of one thread block per slice of each row.
fn grid(rows: usize, slices: usize) -> Grid {
    Grid { blocks: (rows, slices), threads: THREADS, shared_bytes: 0 }
}

/// Returns the tasks of one launch, followed by their lists. A task refers to a list by the index of the list's first
/// word.
fn words(rows: &[(usize, &Nomination)], tokens: usize, lists: Lists) -> Vec<u32> {
    let mut words = vec![0; rows.len() * NominationTask::WORDS];
    let mut masks = Masks::default();
    for (task, (row, nomination)) in rows.iter().enumerate() {
        let adjustments = nomination.adjustments.as_ref().filter(|_| lists == Lists::OfAdjustments);
        let adjusts = u32::from(adjustments.is_some());
        let allowed = adjustments.and_then(|adjustments| adjustments.allowed.as_ref());
        let allowed = allowed.map_or(0, |mask| masks.first_word(mask, &mut words));
        let adjustments = adjustments.cloned().unwrap_or_default();
        let mut list = |own: &mut dyn Iterator<Item = u32>, words_each: u32| {
            let first = words.len();
            words.extend(own);
            [first as u32, (words.len() - first) as u32 / words_each]
        };
        let pairs = adjustments.bias.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]);
        let [bias, bias_count] = list(&mut pairs.into_iter(), 2);
        let [forbidden, forbidden_count] = list(&mut adjustments.forbidden.iter().copied(), 1);
        let [repeated, repeated_count] = list(&mut adjustments.repeated.iter().copied(), 1);
        let pairs = adjustments.counted.iter().flat_map(|&(token, count)| [token, count]);
        let [counted, counted_count] = list(&mut pairs.into_iter(), 2);
        let record = NominationTask {
            row: *row as u32,
            count: nomination.count.min(tokens as u32),
            temperature: nomination.temperature,
            repetition: adjustments.repetition_penalty,
            presence: adjustments.presence_penalty,
            frequency: adjustments.frequency_penalty,
            adjusts,
            allowed,
            bias,
            bias_count,
            forbidden,
            forbidden_count,
            repeated,
            repeated_count,
            counted,
            counted_count,
        };
        words[task * NominationTask::WORDS..][..NominationTask::WORDS].copy_from_slice(record.words());
    }
    words
}
