//! The interface between the engine and a model: declaration, limits, and the operations of a step.

use tutti_kernels::{DeviceError, PageId, SampleRow, Sampled, ScoreRow, StepInputs, TokenScore};
use tutti_proto::declaration::{ModelDeclaration, WalkId};

use crate::{PageLayout, StepHook};

/// The bounds of a model, known before the first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of token ids in the vocabulary. Every token id is below this number.
    pub vocab_size: usize,
    /// Maximum number of tokens of a request, prompt and output together.
    pub max_context_tokens: usize,
    /// The token ids that end a sequence, ascending. Empty if the checkpoint names none.
    pub eos_token_ids: Vec<u32>,
    /// Maximum number of tokens per step. It sets the size of the activation buffers.
    pub max_step_tokens: usize,
}

/// Requests for results from a step's logit rows. Each entry begins with an index into [`StepInputs::logit_rows`], and
/// each list is sorted by that index.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitRequests<'a> {
    /// Logit rows to sample a token from.
    pub sample: &'a [(usize, SampleRow<'a>)],
    /// Logit rows in which to look up the logprob of a known token.
    pub score: &'a [(usize, ScoreRow)],
}

/// The results of [`LogitRequests`], in the order of the requests.
#[derive(Clone, Debug, Default)]
pub struct LogitResults {
    /// One result per entry of `sample`.
    pub sampled: Vec<Sampled>,
    /// One result per entry of `score`.
    pub scores: Vec<TokenScore>,
}

/// Embeddings from an encoder. They replace the token embeddings of consecutive tokens of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddedRows<'a> {
    /// Index of the first replaced token among the step's tokens.
    pub first_token: usize,
    /// The embeddings of the tokens, `[tokens, width]`.
    pub values: &'a [f32],
}

/// A loaded model on its device. The interface hides which device that is.
pub trait Model: Send {
    /// The model's nodes, walks and planes.
    fn declaration(&self) -> &ModelDeclaration;
    /// The model's bounds.
    fn limits(&self) -> &Limits;
    /// Returns one line for logs: family, size, type of weights, device.
    fn describe(&self) -> String;
    /// Bytes of weights that the model holds: as stored in the checkpoint, or as quantised.
    fn weight_bytes(&self) -> u64;
    /// Bytes of buffers for the largest step, without weights and pages: activations of [`Limits::max_step_tokens`],
    /// one tile of logits, and scratch memory. The result includes every buffer only after a step has run and sampled a
    /// token.
    fn step_bytes(&self) -> u64;
    /// Bytes per KV page, over all layers.
    fn page_bytes(&self) -> usize;

    /// Allocates the KV pool of `pages` pages, the null page included, before the first step. A second call replaces
    /// the pool.
    fn allocate_pages(&mut self, pages: usize) -> Result<(), DeviceError>;

    /// Layout of pages on the wire. The layout is equal for all ranks of a group and for groups of any size.
    fn page_layout(&self) -> PageLayout;
    /// Waits for the device, then appends the contents of `pages` to `out`, in the order of [`Model::page_layout`]. The
    /// model of a single rank appends that rank's share. The model of a TP group's leader appends whole pages, with the
    /// shares of all ranks.
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// Writes this rank's share of `data` to `pages`. `data` holds whole pages.
    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError>;

    /// Sets a hook that every step runs between its layers or, in a model without layers, at short intervals. A model
    /// that cannot pause drops the hook. A TP group drops the hook, because all ranks of the group would have to pause
    /// at the same layer.
    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        drop(hook);
    }

    /// Runs all layers over the step's tokens and writes their keys and values. The hidden states stay on the device
    /// until the next call.
    ///
    /// Fails without running anything if the step is larger than [`Limits::max_step_tokens`] or no pages are allocated.
    fn forward(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError>;

    /// Runs [`forward`](Self::forward) with embeddings for the tokens that stand for media. The result does not depend
    /// on how these tokens are divided among steps.
    fn forward_with(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        match embeddings {
            [] => self.forward(inputs),
            [..] => Err(DeviceError::Misuse("this model takes no embeddings".into())),
        }
    }

    /// True if this model holds the node that prefills and decodes. A model without that node has no pages and can run
    /// only [`encode`](Self::encode).
    fn has_thinker(&self) -> bool {
        true
    }

    /// Runs the encoder of `walk` over `data`, one item of media, and appends the embeddings of the item's tokens to
    /// `out`: `[tokens, width]`. Waits for the device. In a TP group only the leader encodes.
    fn encode(&mut self, walk: WalkId, data: &[u8], out: &mut Vec<f32>) -> Result<(), DeviceError> {
        let _ = (data, out);
        Err(DeviceError::Misuse(format!("walk {walk} passes no encoder of this worker")))
    }

    /// Computes the logits that `wanted` needs, from the hidden states of the last [`Model::forward`], and appends the
    /// results to `out`. The LM head runs over one tile of logit rows at a time, so that scratch memory does not grow
    /// with the prompt. It may skip rows without a request. Waits for the device.
    fn read_logits(&mut self, wanted: &LogitRequests<'_>, out: &mut LogitResults) -> Result<(), DeviceError>;

    /// Computes this rank's share of logits while the leader of the TP group runs [`read_logits`](Self::read_logits).
    /// `wanted` holds the indices of all logit rows that the leader's requests name, ascending. Does nothing in a model
    /// whose LM head is not divided among ranks.
    fn follow_logits(&mut self, wanted: &[usize]) -> Result<(), DeviceError> {
        let _ = wanted;
        Ok(())
    }
}
