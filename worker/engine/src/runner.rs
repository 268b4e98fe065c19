//! The steps in flight on a model: enqueued in the order of their plans, and collected in the same order.
//!
//! The logits of a step follow its forward at once, unless a mask depends on a token of a step in flight. Then they are
//! pending until that step is committed, and the forward runs meanwhile. No other step is enqueued until then.
//!
//! No forward is enqueued twice. A model that refuses a forward has not run any of it, so the forward's chunks are
//! enqueued again one by one, and only the rows at fault fail. Once a forward is enqueued, a row can fail only by
//! itself, and any other error is the loss of the device.
//!
//! A row whose results are not finite fails its own request. A broken device or damaged weights would fail every
//! request in this way for ever. So the device counts as lost after [`NOT_FINITE_LIMIT`] such rows with no sound row
//! between them.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tutti_kernels::{DeviceError, SlotCopy};
use tutti_models::{ExpertLoad, LogitResults, Model};
use tutti_runtime::Error;
use tutti_scheduler::NotSampled;

use crate::{
    batch::{self, Batch, Forward, ForwardChunk, RowResult, RowResults, Sampling, StepRow},
    encode::encode,
    encoder_cache::{EncoderCache, EncoderCounts},
    engine_core::Job,
    logits::PendingLogits,
    poison::Poison,
    sequences::Sequences,
};

/// Number of consecutive rows with results that are not finite after which the device counts as lost. Each of these
/// rows belongs to a different request, because such a row ends its request.
const NOT_FINITE_LIMIT: usize = 8;
/// Minimum interval between two readings of the experts' loads. A reading visits the counter of every expert.
const EXPERT_LOADS_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct Runner {
    pub model: Box<dyn Model>,
    pub batch: Batch,
    /// Poisons memory before a request gets it; `None` if memory is not poisoned.
    poison: Option<Poison>,
    /// The sequences of running requests.
    pub sequences: Sequences,
    /// Number of forwards that have returned.
    pub forwards: Arc<AtomicU64>,
    /// Steps in flight, the oldest first.
    steps: VecDeque<StepInFlight>,
    /// Number of forwards in flight, of all steps.
    in_flight: usize,
    /// Logits of the youngest step's last forward, which wait for the commit of the steps before.
    pending: Option<PendingLogits>,
    /// Time at which the last step was collected.
    collected: Instant,
    /// Buffer for the results of one forward.
    results: LogitResults,
    /// Number of rows with results that are not finite since the last row with sound results.
    not_finite: usize,
    /// Time of the next reading of the experts' loads.
    expert_loads_due: Instant,
    encoder_cache: EncoderCache,
}

struct StepInFlight {
    job: Job,
    enqueued: Instant,
    progress: Progress,
}

/// The forwards of a step that are enqueued so far.
struct Progress {
    results: RowResults,
    /// Forwards in flight, the oldest first.
    forwards: VecDeque<Forward>,
    /// Number of tokens of padding of all forwards so far.
    padding: usize,
    /// Rows that were to sample a token, by index, and whether none is sampled.
    lacks_token: Vec<(usize, bool)>,
}

/// A step whose results have all been collected.
pub(crate) struct CollectedStep {
    pub job: Job,
    pub results: RowResults,
    /// Number of tokens of padding that the device computed.
    pub padding: usize,
    /// Duration of the step: the time since the previous step was collected or, if later, since this step was enqueued.
    pub took: Duration,
    /// Loads of the model's experts; empty if they were not read after this step.
    pub expert_loads: Vec<ExpertLoad>,
    /// Counts of encoder calls, those of this step included.
    pub encoders: EncoderCounts,
}

impl Progress {
    fn push(&mut self, forward: Forward) {
        self.padding += forward.padding;
        let lacks_token = forward.answers.iter().filter_map(|answers| {
            answers.sampling.as_ref().map(|way| (answers.row_index, matches!(way, Sampling::Not(_))))
        });
        self.lacks_token.extend(lacks_token);
        self.forwards.push_back(forward);
    }

    /// Leaves a row out of the step's forwards. A later step runs it.
    fn postpone(&mut self, row_index: usize) {
        let not_sampled = Some(NotSampled::Late);
        self.results[row_index] = Ok(RowResult { not_sampled, ..RowResult::default() });
        self.lacks_token.push((row_index, true));
    }
}

impl Runner {
    /// Creates a runner that keeps up to `encoder_cache_bytes` of embeddings that it has encoded.
    pub fn new(model: Box<dyn Model>, batch: Batch, encoder_cache_bytes: usize) -> Self {
        Self {
            poison: Poison::of(&*model),
            model,
            batch,
            sequences: Sequences::default(),
            forwards: Arc::default(),
            steps: VecDeque::new(),
            in_flight: 0,
            pending: None,
            collected: Instant::now(),
            results: LogitResults::default(),
            not_finite: 0,
            expert_loads_due: Instant::now(),
            encoder_cache: EncoderCache::new(encoder_cache_bytes),
        }
    }

    /// True if another step may be enqueued.
    pub fn has_room(&self) -> bool {
        self.pending.is_none() && self.steps.len() < self.model.limits().steps_in_flight
    }

    /// Enqueues a step. If the step has more forwards than the device holds, the call waits for the oldest forwards. An
    /// error ends the worker; a row's own failure is part of the results.
    pub fn enqueue(&mut self, job: Job) -> Result<(), Error> {
        let enqueued = Instant::now();
        let mut progress = Progress {
            results: job.step.rows.iter().map(|_| Ok(RowResult::default())).collect(),
            forwards: VecDeque::new(),
            padding: 0,
            lacks_token: Vec::new(),
        };
        self.enqueue_forwards(&job, &mut progress).map_err(fatal)?;
        for (row, result) in job.step.rows.iter().zip(&progress.results) {
            if let Err(error) = result {
                tracing::error!(key = %row.key, %error, "the request's row failed");
                self.sequences.fail(row);
            }
        }
        note_tokens(&mut self.sequences, &job, &mut progress);
        self.steps.push_back(StepInFlight { job, enqueued, progress });
        Ok(())
    }

    /// True if no logits are pending, or if all steps before are committed.
    pub fn finishes_logits(&self) -> bool {
        self.pending.is_none() || self.steps.len() == 1
    }

    /// Enqueues pending logits, if all steps before are committed.
    pub fn finish_logits(&mut self) -> Result<(), Error> {
        let [StepInFlight { job, progress, .. }] = self.steps.make_contiguous() else { return Ok(()) };
        let Some(pending) = self.pending.take() else { return Ok(()) };
        let wait = self.batch.mask_wait();
        let forward = pending.enqueue(&mut *self.model, &job.step.rows, &self.sequences, wait);
        progress.push(forward.map_err(fatal)?);
        note_tokens(&mut self.sequences, job, progress);
        Ok(())
    }

    fn enqueue_forwards(&mut self, job: &Job, progress: &mut Progress) -> Result<(), DeviceError> {
        // The sequences are taken out of `self`, so that they stay borrowed while other fields change.
        let sequences = std::mem::take(&mut self.sequences);
        let rows = self.encode_rows(job, &sequences, &mut progress.results);
        let enqueued = rows.and_then(|rows| self.enqueue_chunks((job, &sequences), rows, progress));
        self.sequences = sequences;
        enqueued
    }

    /// Encodes the media of the rows that have any. Returns all rows, each with the first position that a forward must
    /// compute.
    fn encode_rows<'a>(
        &mut self,
        job: &'a Job,
        sequences: &'a Sequences,
        results: &mut RowResults,
    ) -> Result<Vec<StepRow<'a>>, DeviceError> {
        let mut rows = Vec::with_capacity(job.step.rows.len());
        for (row, result) in job.step.rows.iter().zip(results) {
            let sequence = sequences.get(row);
            let sequence = sequence.ok_or_else(|| DeviceError::Lost(format!("{} has no tokens", row.key)))?;
            let mut next = row.positions.start;
            if sequences.has_failed(row) {
                // An earlier row failed and ends the request, so this later row is void.
                *result = Err(DeviceError::Misuse("an earlier row of the request failed".into()));
                next = row.positions.end;
            } else if sequences.lacks_token(row) {
                let not_sampled = Some(NotSampled::Void);
                *result = Ok(RowResult { not_sampled, ..RowResult::default() });
                next = row.positions.end;
            } else if !sequence.encodings.is_empty() {
                let shapes = self.batch.limits().encoder_shapes.as_ref();
                let (model, cache) = (&mut *self.model, &mut self.encoder_cache);
                match encode(model, cache, &row.positions, &sequence.encodings, shapes) {
                    Err(error @ DeviceError::Lost(_)) => return Err(error),
                    encoded => *result = encoded.map(|encoded| RowResult { encoded, ..Default::default() }),
                }
                next = row.positions.end;
            }
            rows.push(StepRow { row, sequence, next });
        }
        Ok(rows)
    }

    /// Enqueues the forwards of a step's rows. If the model refuses a forward, the forward's chunks run one by one.
    fn enqueue_chunks(
        &mut self,
        (job, sequences): (&Job, &Sequences),
        mut rows: Vec<StepRow<'_>>,
        progress: &mut Progress,
    ) -> Result<(), DeviceError> {
        if let Some(poison) = &self.poison {
            poison.apply(&mut *self.model, &job.step)?;
        }
        // The slot copies are part of the step's first forward.
        let mut copies = job.step.copies.clone();
        loop {
            let mut chunks = self.batch.chunks(&mut rows);
            if chunks.is_empty() {
                return Ok(());
            }
            if rows.iter().any(|row| row.next < row.row.positions.end) {
                // Another forward follows, and its step cannot wait for a commit.
                chunks
                    .extract_if(.., |chunk| chunk.awaits_commit())
                    .for_each(|c| progress.postpone(c.row_index));
                if chunks.is_empty() {
                    continue;
                }
            }
            self.make_room(progress)?;
            match self.batch.forward(&mut *self.model, &chunks, &copies) {
                Ok(logits) => {
                    self.in_flight += 1;
                    copies.clear();
                    if logits.await_commit() {
                        self.pending = Some(logits);
                    } else {
                        progress.push(self.logits(logits, job, sequences)?);
                    }
                }
                Err(error @ DeviceError::Lost(_)) => return Err(error),
                Err(error) => {
                    let (step, rows_of_forward) = (&job.step.number, chunks.len());
                    tracing::warn!(
                        step = step.0,
                        rows = rows_of_forward,
                        %error,
                        "step refused; running its rows one by one"
                    );
                    for chunk in &chunks {
                        if chunk.awaits_commit() {
                            progress.postpone(chunk.row_index);
                        } else if !self.enqueue_alone((job, sequences), chunk, &mut copies, progress)? {
                            rows[chunk.row_index].next = chunk.row.positions.end;
                        }
                    }
                }
            }
        }
    }

    /// Enqueues one chunk of a refused forward, with the slot copies of its request. Returns false if the model refuses
    /// the chunk alone, too. The chunk's row then fails, and its copies are dropped.
    fn enqueue_alone(
        &mut self,
        (job, sequences): (&Job, &Sequences),
        chunk: &ForwardChunk<'_>,
        copies: &mut Vec<SlotCopy>,
        progress: &mut Progress,
    ) -> Result<bool, DeviceError> {
        let slot = chunk.row.slot;
        let own = |copy: &SlotCopy| copy.from == slot || copy.to == slot;
        let own_copies: Vec<SlotCopy> = copies.extract_if(.., |copy| own(copy)).collect();
        self.make_room(progress)?;
        match self.batch.forward(&mut *self.model, std::slice::from_ref(chunk), &own_copies) {
            Ok(logits) => {
                self.in_flight += 1;
                progress.push(self.logits(logits, job, sequences)?);
                Ok(true)
            }
            Err(error @ DeviceError::Lost(_)) => Err(error),
            Err(error) => {
                progress.results[chunk.row_index] = Err(error);
                Ok(false)
            }
        }
    }

    fn logits(
        &mut self,
        logits: PendingLogits,
        job: &Job,
        sequences: &Sequences,
    ) -> Result<Forward, DeviceError> {
        logits.enqueue(&mut *self.model, &job.step.rows, sequences, self.batch.mask_wait())
    }

    /// Collects the oldest forwards until one more may be enqueued. `current` holds the forwards of the step that is
    /// being enqueued. They are younger than all other forwards.
    fn make_room(&mut self, current: &mut Progress) -> Result<(), DeviceError> {
        while self.in_flight >= self.model.limits().steps_in_flight {
            let older = self.steps.iter_mut().map(|step| &mut step.progress);
            let oldest = older.chain([&mut *current]).find(|progress| !progress.forwards.is_empty());
            let Some(oldest) = oldest else { break };
            collect_forward(&mut *self.model, oldest, &mut self.results)?;
            self.in_flight -= 1;
            self.forwards.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Waits for the oldest step. `None` if no step is in flight. An error ends the worker.
    pub fn collect(&mut self) -> Result<Option<CollectedStep>, Error> {
        self.finish_logits()?;
        let Some(StepInFlight { job, enqueued, mut progress }) = self.steps.pop_front() else {
            return Ok(None);
        };
        while !progress.forwards.is_empty() {
            collect_forward(&mut *self.model, &mut progress, &mut self.results).map_err(fatal)?;
            self.in_flight -= 1;
            self.forwards.fetch_add(1, Ordering::Relaxed);
        }
        self.count_not_finite(&progress.results).map_err(fatal)?;
        let since = self.collected.max(enqueued);
        self.collected = Instant::now();
        let expert_loads = self.expert_loads().map_err(fatal)?;
        let Progress { results, padding, .. } = progress;
        let (took, encoders) = (self.collected - since, self.encoder_cache.counts());
        Ok(Some(CollectedStep { job, results, padding, took, expert_loads, encoders }))
    }

    /// Reads the loads of the experts if the interval has passed.
    fn expert_loads(&mut self) -> Result<Vec<ExpertLoad>, DeviceError> {
        let mut loads = Vec::new();
        if self.collected >= self.expert_loads_due {
            self.model.expert_loads(&mut loads)?;
            self.expert_loads_due = self.collected + EXPERT_LOADS_INTERVAL;
        }
        Ok(loads)
    }
}

impl Runner {
    /// Counts rows whose results are not finite. Returns the loss of the device once [`NOT_FINITE_LIMIT`] is reached.
    fn count_not_finite(&mut self, results: &RowResults) -> Result<(), DeviceError> {
        if results.iter().flatten().any(|row| row.sampled.is_some() || !row.encoded.is_empty()) {
            self.not_finite = 0;
            return Ok(());
        }
        let of_row = |error: &&DeviceError| matches!(error, DeviceError::NotFinite(_));
        self.not_finite += results.iter().filter_map(|row| row.as_ref().err()).filter(of_row).count();
        if self.not_finite < NOT_FINITE_LIMIT {
            return Ok(());
        }
        let count = self.not_finite;
        Err(DeviceError::Lost(format!(
            "the results of {count} requests were not finite, and none was between"
        )))
    }
}

/// Waits for the oldest forward of a step and moves its results to the step's rows.
fn collect_forward(
    model: &mut dyn Model,
    progress: &mut Progress,
    results: &mut LogitResults,
) -> Result<(), DeviceError> {
    let Some(forward) = progress.forwards.pop_front() else { return Ok(()) };
    results.clear();
    model.collect(None, results).map_err(batch::lost)?;
    forward.distribute(results, &mut progress.results)
}

/// Records which requests lack a token that a row in flight was to sample.
fn note_tokens(sequences: &mut Sequences, job: &Job, progress: &mut Progress) {
    for (row_index, lacks_token) in progress.lacks_token.drain(..) {
        sequences.set_lacks_token(&job.step.rows[row_index], lacks_token);
    }
}

fn fatal(error: DeviceError) -> Error {
    Error::internal(error.to_string())
}
