//! What the engine sees of a model: its declaration, its limits, and the operations of a step.

use tutti_kernels::{DeviceError, PageId, SampleRow, Sampled, ScoreRow, StepInputs, TokenScore};
use tutti_proto::declaration::{ModelDeclaration, WalkId};

use crate::{PageLayout, StepHook};

/// The bounds of a model, known before the first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ids in the vocabulary; a token id is smaller than this.
    pub vocab_size: usize,
    /// The most tokens, prompt and output together, that the model's positions reach.
    pub max_context_tokens: usize,
    /// The ids that end a sequence, ascending. Empty where the checkpoint names none.
    pub eos_token_ids: Vec<u32>,
    /// The most tokens of one step: what the activation buffers hold.
    pub max_step_tokens: usize,
}

/// What is wanted of a step's logit rows. An index counts within the step's `logit_rows`; both lists ascend by it.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogitRequests<'a> {
    /// Rows to sample a token from.
    pub sample: &'a [(usize, SampleRow<'a>)],
    /// Rows in which to look up a known token.
    pub score: &'a [(usize, ScoreRow)],
}

/// The answers to [`LogitRequests`], in their order.
#[derive(Clone, Debug, Default)]
pub struct LogitResults {
    /// One for each of `sample`.
    pub sampled: Vec<Sampled>,
    /// One for each of `score`.
    pub scores: Vec<TokenScore>,
}

/// Embeddings that an encoder gave, in the place of tokens' own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddedRows<'a> {
    /// Index of the first of those tokens among the step's tokens.
    pub first_token: usize,
    /// `[tokens, width]`, end to end.
    pub values: &'a [f32],
}

/// A loaded model on its device. Which device that is stays hidden here.
pub trait Model: Send {
    /// Its nodes, walks and planes.
    fn declaration(&self) -> &ModelDeclaration;
    /// Its bounds.
    fn limits(&self) -> &Limits;
    /// One line for logs: family, size, weights' type, device.
    fn describe(&self) -> String;
    /// Bytes of weights that the model holds: as the checkpoint stores them, or as they were quantised.
    fn weight_bytes(&self) -> u64;
    /// Bytes that steps work in at their largest, beside weights and pages: activations of
    /// [`Limits::max_step_tokens`], one tile of logits, scratch. Complete once a step has run and sampled.
    fn step_bytes(&self) -> u64;
    /// Bytes that one KV page takes, over all layers.
    fn page_bytes(&self) -> usize;

    /// Allocates the KV pool: `pages` pages, the null page included. Called once, before the first step; called
    /// again it replaces the pool.
    fn allocate_pages(&mut self, pages: usize) -> Result<(), DeviceError>;

    /// How its pages travel to other workers: the same for every rank of a group, and for groups of any size.
    fn page_layout(&self) -> PageLayout;
    /// Appends what this rank holds of pages, in the order of [`Model::page_layout`]; all of it, where one rank is the
    /// whole group or leads it. Waits for the device.
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError>;
    /// Takes its part of whole pages.
    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError>;

    /// Has every step pause between its layers, or as often, for `hook`. A model that cannot pause drops it: a TP group
    /// does, whose ranks would all have to pause at the same place.
    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        drop(hook);
    }

    /// Runs all layers over the step's tokens, writing their keys and values. The hidden states stay on the device
    /// until the next call.
    ///
    /// Fails, having run nothing, when the step is larger than [`Limits::max_step_tokens`] or no pages are allocated.
    fn forward(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError>;

    /// As [`forward`](Self::forward), with the embeddings of tokens that stand for media. The same whatever rows they come
    /// in, and however many steps an item is cut into.
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

    /// Whether it holds the node that prefills and decodes. Without it there are no pages, and nothing but
    /// [`encode`](Self::encode) can be run.
    fn thinks(&self) -> bool {
        true
    }

    /// Runs an encoder over one item of media, appending the embeddings of its tokens, `[tokens, width]`. Waits for the
    /// device. Of a TP group the leader does so by itself.
    fn encode(&mut self, walk: WalkId, data: &[u8], out: &mut Vec<f32>) -> Result<(), DeviceError> {
        let _ = (data, out);
        Err(DeviceError::Misuse(format!("walk {walk} passes no encoder that is held here")))
    }

    /// Computes logits of the last [`Model::forward`] and answers `wanted`, appending to `out`. The LM head runs over
    /// one tile of rows at a time, and only over tiles that something is wanted of, so that scratch does not grow with
    /// the prompt. Waits for the device.
    fn read_logits(&mut self, wanted: &LogitRequests<'_>, out: &mut LogitResults) -> Result<(), DeviceError>;

    /// What a rank of a TP group other than its leader does while the leader reads logits: its part in computing those
    /// of the rows `wanted`, ascending, which are all that the leader's requests name. Nothing, unless ranks share that
    /// work.
    fn follow_logits(&mut self, wanted: &[usize]) -> Result<(), DeviceError> {
        let _ = wanted;
        Ok(())
    }
}
