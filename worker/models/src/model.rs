//! The interface between the engine and a model: declaration, limits, and the operations of a step.
//!
//! A step is enqueued, then collected. [`Model::forward`] enqueues the layers, [`Model::enqueue_logits`] enqueues the
//! sampling and the scores, and [`Model::collect`] returns the results of the oldest step in flight. A step is in
//! flight from its enqueueing to its collection. A device that computes while the host continues can have several steps
//! in flight ([`Limits::steps_in_flight`]). A CPU computes a step during the enqueueing, so it has at most one step in
//! flight.

use std::{borrow::Cow, time::Instant};

/// The results of [`LogitRequests`]: each list has one result per request, in order.
pub use tutti_kernels::StepResults as LogitResults;
use tutti_kernels::{DeviceError, Nomination, PageId, SampleRow, ScoreRow, SlotId, StepInputs};
use tutti_proto::{
    cluster::v1::MediaGrid,
    declaration::{ModelDeclaration, WalkId},
};

use crate::{ExpertLoad, GroupShares, PageLayout, StepHook};

/// The bounds of a model, known before the first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of token ids in the vocabulary. Every token id is below this number.
    pub vocab_size: usize,
    /// Maximum number of tokens of a request, including prompt and output.
    pub max_context_tokens: usize,
    /// The token ids that end a sequence, ascending. Empty if the checkpoint names none.
    pub eos_token_ids: Vec<u32>,
    /// Maximum number of tokens per step, padding included. It sets the size of the activation buffers.
    pub max_step_tokens: usize,
    /// Maximum number of steps in flight, at least 1.
    pub steps_in_flight: usize,
}

/// Requests for results from a step's logit rows. Each entry begins with an index into [`StepInputs::logit_rows`], and
/// each list is sorted by that index.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitRequests<'a> {
    /// Rows from which to sample a token.
    pub sample: &'a [(usize, SampleRow<'a>)],
    /// Rows in which to look up the logprob of a known token.
    pub score: &'a [(usize, ScoreRow)],
}

/// The logit rows that [`LogitRequests`] name, as the other ranks of a TP group need them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WantedRows {
    /// Indices of all rows with a request, ascending.
    pub rows: Vec<usize>,
    /// Indices of the rows that need only their likeliest token, ascending and without repetitions.
    pub likeliest: Vec<usize>,
    /// Indices and nominations of rows that need only a few best tokens. Rows in `likeliest` are not included.
    /// Ascending and without repetitions. Always empty in a group of one rank.
    pub nominated: Vec<(usize, Nomination)>,
}

impl LogitRequests<'_> {
    /// Returns the rows that the requests name, for a TP group.
    pub fn rows_of_group(&self) -> WantedRows {
        let mut wanted = self.rows(false);
        for (index, (row, sample)) in self.sample.iter().enumerate() {
            let is_likeliest = wanted.likeliest.binary_search(row).is_ok();
            let twice = |other: Option<&(usize, SampleRow<'_>)>| other.is_some_and(|(other, _)| other == row);
            let is_alone = !twice(self.sample.get(index + 1))
                && !twice(index.checked_sub(1).and_then(|before| self.sample.get(before)))
                && self.score.binary_search_by_key(row, |(other, _)| *other).is_err();
            if let Some(nomination) = sample.nomination().filter(|_| is_alone && !is_likeliest) {
                wanted.nominated.push((*row, nomination));
            }
        }
        wanted
    }

    /// Returns the rows that the requests name, for a group of one rank. `masks` says that the likeliest token may be
    /// that which a mask allows.
    pub fn rows(&self, masks: bool) -> WantedRows {
        let named = self.sample.iter().map(|(row, _)| *row).chain(self.score.iter().map(|(row, _)| *row));
        let mut rows: Vec<usize> = named.collect();
        // Both lists are sorted, but a row may have several requests.
        rows.sort_unstable();
        let likeliest = |(row, sample): &&(usize, SampleRow<'_>)| {
            let first = rows.partition_point(|other| other < row);
            let likeliest = match masks {
                true => sample.takes_the_likeliest_allowed(),
                false => sample.takes_the_likeliest(),
            };
            likeliest && rows.get(first + 1) != Some(row)
        };
        let likeliest = self.sample.iter().filter(likeliest).map(|(row, _)| *row).collect();
        rows.dedup();
        WantedRows { rows, likeliest, nominated: Vec::new() }
    }
}

/// A media item for an encoder, in the form that the declaration says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderItem<'a> {
    /// The item's data.
    pub data: &'a [u8],
    /// The grid of patches; `None` unless the item is an image or a video.
    pub grid: Option<MediaGrid>,
}

impl<'a> From<&'a [u8]> for EncoderItem<'a> {
    fn from(data: &'a [u8]) -> Self {
        Self { data, grid: None }
    }
}

/// Embeddings from an encoder, which replace the token embeddings of consecutive tokens of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddedRows<'a> {
    /// Index of the first replaced token among the step's tokens.
    pub first_token: usize,
    /// Elements per row: a multiple of the width of the residual stream. The first part of a row is the embedding.
    /// Each further part is added to the residual stream behind one of the first layers (*deepstack*).
    pub width: usize,
    /// The rows of the tokens, `[tokens, width]`.
    pub values: &'a [f32],
}

impl<'a> EmbeddedRows<'a> {
    /// Number of parts of each row, which are `part_width` wide.
    pub(crate) fn parts(&self, part_width: usize) -> usize {
        self.width.checked_div(part_width).unwrap_or(0)
    }

    /// Returns part `index` of all rows, end to end.
    pub(crate) fn part(&self, index: usize, part_width: usize) -> Cow<'a, [f32]> {
        if self.width == part_width {
            return Cow::Borrowed(self.values);
        }
        let of_row = |row: &'a [f32]| row.iter().skip(index * part_width).take(part_width).copied();
        Cow::Owned(self.values.chunks_exact(self.width.max(1)).flat_map(of_row).collect())
    }
}

/// A loaded model on its device. The interface is the same for all devices.
pub trait Model: Send {
    /// The model's nodes, walks and planes.
    fn declaration(&self) -> &ModelDeclaration;
    /// Bounds such as the vocabulary size and the maximum context.
    fn limits(&self) -> &Limits;
    /// Describes the model in one line for logs: family, size, type of weights, device.
    fn describe(&self) -> String;
    /// Describes the device in a few words, for operators.
    fn device_name(&self) -> String;
    /// Bytes of the model's weights, in their stored or quantised form.
    fn weight_bytes(&self) -> u64;
    /// Bytes of the buffers for the largest step: activations for [`Limits::max_step_tokens`] tokens, one tile of
    /// logits, and scratch memory. Weights and pages are not included. The result includes every buffer only after a
    /// step has run and sampled a token.
    fn step_bytes(&self) -> u64;
    /// Free bytes of the device's own memory; `None` if the device computes in the host's memory.
    fn free_bytes(&self) -> Option<u64> {
        None
    }
    /// Bytes per KV page, over all layers.
    fn page_bytes(&self) -> usize;

    /// Allocates the planes before the first step: `pages` pages of every paged plane and `slots` slots of every slot
    /// plane, the null page and the null slot included. A second call replaces the planes.
    fn allocate_planes(&mut self, pages: usize, slots: usize) -> Result<(), DeviceError>;

    /// Layout of pages and slots on the wire. The layout is equal for all ranks of a group and for groups of any size.
    fn page_layout(&self) -> PageLayout;
    /// Waits for the device, then appends the contents of `pages` to `out`, in the order of [`Model::page_layout`]. The
    /// model of a single rank appends that rank's share. The model of a TP group's leader appends whole pages, with the
    /// shares of all ranks.
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// Writes `data`, which [`read_pages`](Self::read_pages) has returned, to `pages`. The model of a single rank
    /// writes that rank's share. The model of a TP group's leader takes whole pages and hands each rank its share.
    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError>;

    /// Waits for the device, then appends a request's state to `out`: the bytes of `slot` in every slot plane, in the
    /// order of [`Model::page_layout`]. A single rank appends its share, and the leader of a TP group appends the whole
    /// state. Appends nothing in a model without slot planes.
    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let _ = out;
        match self.declaration().has_slots() {
            false => Ok(()),
            true => Err(DeviceError::Misuse(format!("the state in slot {} cannot be read", slot.0))),
        }
    }

    /// Writes bytes that [`read_slot`](Self::read_slot) has returned to `slot`.
    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        match data {
            [] if !self.declaration().has_slots() => Ok(()),
            data => Err(DeviceError::Misuse(format!("{} bytes of state for slot {}", data.len(), slot.0))),
        }
    }

    /// Access to the shares of all ranks; `None` unless this model is the leader of a TP group.
    fn group_shares(&mut self) -> Option<&mut dyn GroupShares> {
        None
    }

    /// Sets a hook that every step runs between its layers or, in a model without layers, at short intervals. The hook
    /// does not run inside [`read_pages`](Self::read_pages) and [`write_pages`](Self::write_pages). A model that cannot
    /// pause drops the hook. A TP group also drops the hook, because all ranks of the group would have to pause at the
    /// same layer.
    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        drop(hook);
    }

    /// Enqueues all layers over the step's tokens, which write their planes. `embeddings` replace the token embeddings
    /// of the tokens that stand for media. The result does not depend on how a request's tokens are divided among
    /// steps. The hidden states stay on the device for [`enqueue_logits`](Self::enqueue_logits).
    ///
    /// After any error but [`DeviceError::Lost`], no part of the step has run or will run, and its results must not be
    /// collected. The model refuses a step larger than [`Limits::max_step_tokens`], a step beyond
    /// [`Limits::steps_in_flight`], a step before the planes are allocated, and inputs that it cannot run.
    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError>;

    /// True if this model holds the node that prefills and decodes. A model without that node has no pages and can run
    /// only [`encode`](Self::encode).
    fn has_thinker(&self) -> bool {
        true
    }

    /// Runs the encoder of `walk` over the data of media items, and appends the embeddings of the items' tokens to
    /// `out`, item by item: `[tokens, width]`. `items` holds one item. If the declaration says [encoded
    /// together](tutti_proto::declaration::MediaInput::encoded_together), `items` holds all items of a request. The
    /// encoder computes `shape` tokens, padding included, or as many as the items have if it is `None`. Padding changes
    /// no bit of the embeddings. Waits for the device. In a TP group only the leader encodes.
    fn encode(
        &mut self,
        walk: WalkId,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        let _ = (items, shape, out);
        Err(DeviceError::Misuse(format!("walk {walk} passes no encoder of this worker")))
    }

    /// Enqueues the logits that `wanted` needs, with their sampling and scores. The logits are computed from the hidden
    /// states of the last enqueued step. The caller makes exactly one call per step, even if `wanted` is empty. The LM
    /// head runs over one tile of logit rows at a time, so that scratch memory does not grow with the prompt. The model
    /// may skip rows without a request.
    ///
    /// An error ends the worker: the planes have advanced, and the step cannot run again.
    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError>;

    /// Waits until the oldest step in flight has ended, and appends its results to `out`. Returns false if the step has
    /// not ended at the time `until`. `None` means no such limit.
    ///
    /// An error ends the worker.
    fn collect(&mut self, until: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError>;

    /// Enqueues the logits of a step and waits for its results. No other step may be in flight.
    fn read_logits(&mut self, wanted: &LogitRequests<'_>, out: &mut LogitResults) -> Result<(), DeviceError> {
        self.enqueue_logits(wanted)?;
        self.collect(None, out).map(|_| ())
    }

    /// Sets `out` to the loads of the experts since [`restart_expert_loads`](Self::restart_expert_loads), one entry per
    /// layer with experts. Leaves `out` empty in a model without experts. In a TP group, every rank routes all tokens,
    /// so the leader's loads are the group's loads.
    fn expert_loads(&mut self, out: &mut Vec<ExpertLoad>) -> Result<(), DeviceError> {
        out.clear();
        Ok(())
    }

    /// Resets the loads of experts to 0.
    fn restart_expert_loads(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Replaces [`enqueue_logits`](Self::enqueue_logits) on the other ranks of a TP group: enqueues this rank's share
    /// of the logits. `wanted` holds the logit rows that the leader's requests name. The caller must collect the step
    /// as on the leader, but the results are empty.
    fn follow_logits(&mut self, wanted: &WantedRows) -> Result<(), DeviceError>;
}
