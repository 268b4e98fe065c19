//! The simulated device (`--device sim`): a model without weights whose steps only take time. Tests of scheduling, of
//! faults and of the control plane use it. Its costs and faults come from [`SimSettings`] (settings/src/sim.rs), which
//! the conductor reads, too.
//!
//! The pages hold 8 bytes per token: a digest of that token and all tokens before it, computed from the digest at the
//! previous position. A sampled token is a function of the digest at the last position before it. The token is thus
//! right only if every position of the request was computed, in order, in pages that no other request wrote to. A
//! request gets the same tokens alone or in a batch, in one chunk or many, and on any worker. [`digest`] is short, so
//! that tests in other languages can compute the expected tokens.
//!
//! With the setting `entry_tokens`, the pages hold 8 bytes per group of tokens, as those of compressed attention.
//!
//! With the setting `state`, each request's slot also holds the digest so far, as the state of a recurrent model. A
//! wrong restore, a copy at the wrong time or a step that ran twice then gives wrong tokens, because slot and pages
//! disagree ([`planes`]).
//!
//! Builds for tests can replace the digest by a script ([`rule`]), which gives answers that a test has written.
//!
//! A step's results are computed when the step is enqueued, but the step takes time on a timeline ([`clock`]). The host
//! continues while the simulated device is busy, and gets the results when the step has ended.

mod clock;
mod digest;
mod encoders;
mod planes;
mod rule;
#[cfg(feature = "media-test-model")]
mod script;

use std::{
    collections::VecDeque,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tutti_kernels::{DeviceError, PageId, RowInputs, SampleRow, Sampled, SlotId, StepInputs, TokenScore};
use tutti_proto::cluster::v1::ElementType;
use tutti_proto::declaration::{DeclarationError, ModelDeclaration, NodeId, Plane, PlaneKind, WalkId};
use tutti_settings::SimSettings;

pub use self::clock::SimMeter;
use self::{
    clock::SimClock,
    encoders::Encoders,
    planes::{DIGEST_BYTES, SimPlanes, slot_bytes},
    rule::Rule,
};
use crate::{
    EncoderItem, LoadError, Model, PageLayout, PausedPages, PlaneLayout, PlaneStorage, Section, StepHook,
    config::{ConfigFile, eos_token_ids, ranges},
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, WantedRows},
    thinker::{self, HeldNodes, KV_PLANE},
};

/// Interval between two runs of the step hook in a step, if the hook may have work.
const PAUSE: Duration = Duration::from_millis(1);

/// Name of the plane of digests in slots.
const STATE_PLANE: &str = "state";

/// A simulated thinker, and encoders if the checkpoint's config has some.
struct Sim {
    declaration: ModelDeclaration,
    has_thinker: bool,
    encoders: Encoders,
    /// The walks of the encoders that this model holds.
    encodes: Vec<WalkId>,
    limits: Limits,
    rule: Rule,
    settings: SimSettings,
    clock: SimClock,
    page_tokens: usize,
    /// `None` until the planes are allocated.
    planes: Option<SimPlanes>,
    step_hook: Option<Box<dyn StepHook>>,
    /// Digest and slot of each logit row of the last enqueued step.
    hidden: Vec<(u64, SlotId)>,
    /// Steps in flight, the oldest first.
    in_flight: VecDeque<SimStep>,
    /// Lists of collected results, whose memory later steps reuse.
    spare: Vec<LogitResults>,
    /// Number of steps so far. The warm-up is step 0.
    steps: u64,
}

/// A step in flight.
struct SimStep {
    number: u64,
    /// Time from which the host can notice that the step has ended.
    end: Instant,
    /// `None` until the step's logits are enqueued.
    results: Option<LogitResults>,
}

/// The checkpoint and the settings of a simulated model.
#[derive(Clone, Copy, Debug)]
pub struct SimOptions<'a> {
    /// Directory of the checkpoint, which may be of any family.
    pub dir: &'a Path,
    /// Maximum number of tokens per step.
    pub max_step_tokens: usize,
    /// Tokens per KV page.
    pub page_tokens: usize,
    /// Names of the nodes to load; `None` loads all.
    pub nodes: Option<&'a [String]>,
    /// Rank of the worker. Workers of different ranks have different jitter.
    pub rank: u32,
    /// Costs and faults.
    pub settings: &'a SimSettings,
}

/// Loads a simulated model. Vocabulary size, context length, end-of-sequence ids and inputs of media come from a
/// checkpoint's config.
pub fn load(options: &SimOptions<'_>) -> Result<Box<dyn Model>, LoadError> {
    load_metered(options).map(|(model, _)| model)
}

/// Loads a simulated model, and also returns the meter of its device's time.
pub fn load_metered(options: &SimOptions<'_>) -> Result<(Box<dyn Model>, Arc<SimMeter>), LoadError> {
    load_file(&ConfigFile::read(options.dir)?, options)
}

/// Loads a simulated model whose config is `file`. The config may be of any family.
pub(crate) fn load_file(
    file: &ConfigFile,
    options: &SimOptions<'_>,
) -> Result<(Box<dyn Model>, Arc<SimMeter>), LoadError> {
    let SimOptions { dir, max_step_tokens, page_tokens, nodes, rank, settings } = *options;
    let keys = file.keys();
    let text = declaration(page_tokens, settings)?;
    let (held, encoders) = (HeldNodes::of(nodes), Encoders::read(&keys, dir)?);
    let declared = encoders.declared();
    let has_thinker = declared.is_empty() || held.thinker();
    let declaration = match declared.is_empty() {
        true => text,
        false => thinker::with_encoders(&text, declared)?,
    };
    let is_held = |walk: WalkId| {
        let nodes = declaration.walk(walk).map_or(&[][..], |walk| &walk.nodes);
        let name = |node: &NodeId| declaration.nodes().get(node.0 as usize);
        nodes.iter().all(|node| name(node).is_some_and(|name| held.holds(name)))
    };
    let encodes = declaration.media().iter().map(|input| input.walk).filter(|walk| is_held(*walk)).collect();
    let vocab_size = keys.need(&ranges::VOCAB_SIZE)?;
    let clock = SimClock::new(settings, rank);
    let meter = Arc::clone(clock.meter());
    let sim = Sim {
        declaration,
        has_thinker,
        encoders,
        encodes,
        limits: Limits {
            vocab_size,
            max_context_tokens: keys.need(&ranges::MAX_POSITION_EMBEDDINGS)?,
            eos_token_ids: eos_token_ids(dir, keys.get(&ranges::EOS_TOKEN_ID)?, vocab_size)?,
            max_step_tokens,
            steps_in_flight: settings.steps_in_flight,
        },
        rule: Rule::read(dir, vocab_size)?,
        clock,
        settings: settings.clone(),
        page_tokens,
        planes: None,
        step_hook: None,
        hidden: Vec::new(),
        in_flight: VecDeque::new(),
        spare: Vec::new(),
        steps: 0,
    };
    Ok((Box::new(sim), meter))
}

/// Declares the simulated thinker alone.
fn declaration(page_tokens: usize, settings: &SimSettings) -> Result<ModelDeclaration, DeclarationError> {
    let kind = PlaneKind::Paged {
        page_tokens: page_tokens as u32,
        ratio: settings.entry_tokens as u32,
        bytes_per_entry: DIGEST_BYTES as u64,
        element_type: ElementType::Unspecified,
    };
    let mut planes = vec![Plane { name: KV_PLANE.into(), kind }];
    if settings.state {
        let kind = PlaneKind::Slot { bytes: slot_bytes(settings.entry_tokens) as u64 };
        planes.push(Plane { name: STATE_PLANE.into(), kind });
    }
    thinker::with_planes(planes)
}

impl Model for Sim {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn describe(&self) -> String {
        let alone = if self.has_thinker() { "" } else { " encoder alone" };
        format!("simulated{alone}, {:?}", self.settings.costs())
    }

    fn device_name(&self) -> String {
        "sim".into()
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn step_bytes(&self) -> u64 {
        (self.limits.max_step_tokens * DIGEST_BYTES) as u64
    }

    fn page_bytes(&self) -> usize {
        self.page_tokens / self.settings.entry_tokens * DIGEST_BYTES
    }

    fn allocate_planes(&mut self, pages: usize, slots: usize) -> Result<(), DeviceError> {
        let sizes = [self.page_tokens, self.settings.entry_tokens];
        self.planes = Some(SimPlanes::new(sizes, pages, slots, self.settings.state));
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        let plane = |name: &str, storage, unit_bytes| PlaneLayout {
            name: name.into(),
            storage,
            sections: vec![Section { units: 1, unit_bytes }],
            format: "simulated: digests".into(),
        };
        let mut planes = vec![plane(
            KV_PLANE,
            PlaneStorage::Pages { ratio: self.settings.entry_tokens },
            self.page_bytes(),
        )];
        if self.settings.state {
            planes.push(plane(STATE_PLANE, PlaneStorage::Slot, slot_bytes(self.settings.entry_tokens)));
        }
        PageLayout { page_tokens: self.page_tokens, planes }
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.planes()?.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.planes()?.write_pages(pages, data)
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.planes()?.read_slot(slot, out)
    }

    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.planes()?.write_slot(slot, data)
    }

    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        self.step_hook = Some(hook);
    }

    fn has_thinker(&self) -> bool {
        self.has_thinker
    }

    fn encode(
        &mut self,
        walk: WalkId,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        if !self.encodes.contains(&walk) {
            return Err(DeviceError::Misuse(format!("walk {walk} passes no encoder of this worker")));
        }
        let tokens = self.encoders.tokens(items)?;
        let row = RowInputs {
            first_token: 0,
            tokens: shape.unwrap_or(tokens).max(tokens),
            start: 0,
            slot: SlotId::NULL,
            continues: false,
            block_table: &[],
        };
        let number = self.begin(None)?;
        let end = self.clock.enqueue(&[row], 0);
        self.wait(number, end, None)?;
        encoders::encode(items, tokens, out);
        Ok(())
    }

    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        let valid = inputs.token_ids.len();
        let (tokens, limit) = (inputs.padded_tokens().max(valid), self.limits.max_step_tokens);
        if tokens > limit {
            return Err(DeviceError::Misuse(format!("a step of {tokens} tokens, the limit is {limit}")));
        }
        if self.in_flight.len() == self.limits.steps_in_flight
            || self.in_flight.back().is_some_and(|step| step.results.is_none())
        {
            return Err(DeviceError::Misuse("the steps before are not collected yet".into()));
        }
        let planes = self.planes.as_ref().ok_or_else(no_planes)?;
        planes.check(inputs)?;
        let fails = self.settings.fail_on_token.filter(|id| planes.holds(inputs, *id));
        let number = self.begin(fails)?;
        self.run(inputs, embeddings)?;
        let end = self.clock.enqueue(inputs.rows, tokens - valid);
        self.in_flight.push_back(SimStep { number, end, results: None });
        Ok(())
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        let mut results = self.spare.pop().unwrap_or_default();
        for (index, row) in wanted.sample {
            let (hidden, slot) = *self.hidden.get(*index).ok_or_else(|| no_row(*index))?;
            let sampled = self.sample(hidden, row);
            if let Ok(sampled) = &sampled {
                self.planes()?.sample(slot, sampled.token);
            }
            results.sampled.push(sampled);
        }
        for (index, row) in wanted.score {
            self.hidden.get(*index).ok_or_else(|| no_row(*index))?;
            results.scores.push(Ok(self.score(row.top)));
        }
        let step = self.in_flight.back_mut().filter(|step| step.results.is_none()).ok_or_else(no_step)?;
        step.results = Some(results);
        Ok(())
    }

    fn collect(&mut self, until: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        let step = self.in_flight.front().filter(|step| step.results.is_some()).ok_or_else(no_step)?;
        if !self.wait(step.number, step.end, until)? {
            return Ok(false);
        }
        if let Some(mut results) = self.in_flight.pop_front().and_then(|step| step.results) {
            out.append(&mut results);
            self.spare.push(results);
        }
        Ok(true)
    }

    fn follow_logits(&mut self, _: &WantedRows) -> Result<(), DeviceError> {
        // Each rank simulates the whole model, but only the leader samples, so this step has no results.
        self.enqueue_logits(&LogitRequests::default())
    }
}

impl Sim {
    fn planes(&mut self) -> Result<&mut SimPlanes, DeviceError> {
        self.planes.as_mut().ok_or_else(no_planes)
    }

    /// Counts a step and returns its number. Refuses every `fail_every`-th step, and every step with a `fails_on`
    /// token. `fails_on` is the setting `fail_on_token` if the step holds that token, else `None`. The warm-up, step 0,
    /// never fails.
    fn begin(&mut self, fails_on: Option<u32>) -> Result<u64, DeviceError> {
        let step = self.steps;
        self.steps += 1;
        if self.settings.fail_every.is_some_and(|every| step > 0 && step.is_multiple_of(every)) {
            return Err(DeviceError::Misuse(format!("simulated, in step {step}")));
        }
        match fails_on {
            Some(id) if step > 0 => Err(DeviceError::Misuse(format!("simulated, by token {id}"))),
            _ => Ok(step),
        }
    }

    /// Computes the digests of a step that has been checked.
    fn run(&mut self, inputs: &StepInputs<'_>, embeddings: &[EmbeddedRows<'_>]) -> Result<(), DeviceError> {
        let rule = &self.rule;
        let planes = self.planes.as_mut().ok_or_else(no_planes)?;
        let mut meanings = embeddings
            .iter()
            .flat_map(|rows| {
                (rows.first_token..).zip(rows.values.chunks(encoders::WIDTH).map(encoders::meaning))
            })
            .peekable();
        let mut wanted = inputs.logit_rows.iter().copied().peekable();
        self.hidden.clear();
        planes.copy(inputs.copies);
        for row in inputs.rows {
            let mut continued = planes.continued(row);
            let mut digest = planes.begin(row)?;
            for index in 0..row.tokens {
                let token = row.first_token + index;
                let id = continued.take().unwrap_or(inputs.token_ids[token]);
                digest = match meanings.next_if(|(index, _)| *index == token) {
                    Some((_, meaning)) => digest::mix(digest ^ meaning),
                    None => rule.extend(digest, id),
                };
                planes.write(row, row.start + index, digest)?;
                while wanted.next_if_eq(&token).is_some() {
                    self.hidden.push((digest, row.slot));
                }
            }
            planes.end(row, digest);
        }
        Ok(())
    }

    /// Waits for a step's end, at most until `until`, and runs the step hook meanwhile. Returns false if the step has
    /// not ended. Hangs, or returns an error, if the settings say that the device hangs or is lost after this step.
    fn wait(&mut self, step: u64, end: Instant, until: Option<Instant>) -> Result<bool, DeviceError> {
        let Self { planes, step_hook, settings, .. } = self;
        let may_have_work = step_hook.as_ref().is_some_and(|hook| hook.may_have_work());
        let until_pause = if may_have_work { PAUSE } else { Duration::MAX };
        let ended = clock::wait(end, until, until_pause, || match (&mut *step_hook, &mut *planes) {
            (Some(hook), Some(planes)) => hook.run(planes),
            _ => Ok(()),
        })?;
        if ended && settings.hang_after.is_some_and(|after| step > after) {
            clock::hang();
        }
        if ended && settings.lose_after.is_some_and(|after| step > after) {
            return Err(DeviceError::Lost(format!("simulated, in step {step}")));
        }
        Ok(ended)
    }

    /// Samples from a uniform distribution over the tokens that are allowed and not forbidden. At temperature 0, the
    /// seed has no effect. All other sampling parameters never have an effect.
    fn sample(&self, hidden: u64, row: &SampleRow<'_>) -> Result<Sampled, DeviceError> {
        let seed = if row.params.temperature > 0.0 { row.params.seed } else { 0 };
        let vocab_size = self.limits.vocab_size as u32;
        let first = self.rule.token(hidden, seed, vocab_size);
        let may_come = |token: &u32| {
            !row.forbidden.contains(token) && row.allowed.is_none_or(|mask| mask.allows(*token))
        };
        let token = (first..vocab_size).chain(0..first).find(may_come).ok_or_else(|| {
            DeviceError::Misuse("mask and forbidden tokens leave no token to sample".to_owned())
        })?;
        Ok(Sampled { token, score: row.logprobs.map(|top| self.score(top)) })
    }

    /// Returns the score, which is equal for all tokens. The top tokens are the tokens with the lowest ids.
    fn score(&self, top: u32) -> TokenScore {
        let logprob = -(self.limits.vocab_size as f32).ln();
        let top = (0..top.min(self.limits.vocab_size as u32)).map(|id| (id, logprob)).collect();
        TokenScore { logprob, rank: 1, top }
    }
}

fn no_planes() -> DeviceError {
    DeviceError::Misuse("no planes are allocated yet".into())
}

fn no_step() -> DeviceError {
    DeviceError::Misuse("no step is in flight".into())
}

fn no_row(index: usize) -> DeviceError {
    DeviceError::Misuse(format!("the step has no logit row {index}"))
}

#[cfg(test)]
mod tests;
