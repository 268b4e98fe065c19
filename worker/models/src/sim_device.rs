//! The simulated device (`--device sim`): a model without weights whose steps only take time. It serves tests of
//! scheduling, of faults and of the control plane. Its costs and faults come from [`SimSettings`]
//! (settings/src/sim.rs), which the conductor reads, too.
//!
//! The KV pool holds 8 bytes per token: a digest of that token and all tokens before it, computed from the digest at
//! the previous position. A sampled token is a function of the digest at the position that it is sampled from. The
//! token is thus right only if every position of the request was computed, in order, in pages that no other request
//! wrote to. A request has the same tokens alone or batched, in one chunk or many, on any worker. [`digest`] is short,
//! so that a test in another language can compute the expected tokens.

mod audio;
mod clock;
mod digest;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde::Deserialize;
use tutti_kernels::{DeviceError, PageId, RowInputs, SampleRow, Sampled, SlotId, StepInputs, TokenScore};
use tutti_proto::declaration::{ModelDeclaration, WalkId};
use tutti_settings::SimSettings;

use self::clock::SimClock;
use crate::{
    LoadError, Model, PageLayout, PausedPages, PlaneLayout, PlanePlace, Section, StepHook,
    config::{ConfigFile, TokenIds, eos_token_ids},
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, WantedRows},
    thinker::{self, Audio, HeldNodes, KV_PLANE},
};

/// Interval between the pauses of a step while the step hook may have work.
const PAUSE: Duration = Duration::from_millis(1);

/// Bytes per token in the KV pool: one digest.
const BYTES_PER_TOKEN: usize = size_of::<u64>();

/// The keys that the simulated model reads from a `config.json` of any family.
#[derive(Deserialize)]
struct Keys {
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    eos_token_id: Option<TokenIds>,
}

/// A simulated thinker, and an encoder if the checkpoint's config has one.
struct Sim {
    declaration: ModelDeclaration,
    held: HeldNodes,
    /// `None` if the model takes only text.
    audio: Option<Audio>,
    limits: Limits,
    settings: SimSettings,
    clock: SimClock,
    page_tokens: usize,
    /// One digest per token of the pool, page by page.
    pool: Vec<u64>,
    step_hook: Option<Box<dyn StepHook>>,
    /// Digests of the last step's logit rows.
    hidden: Vec<u64>,
    /// Results of the step in flight, if there is one.
    in_flight: Option<LogitResults>,
    /// Memory of collected results, for the next step.
    spare: LogitResults,
    /// Number of steps so far. The warm-up is step 0.
    steps: u64,
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
    /// Rank of the worker. It makes the jitter of workers differ.
    pub rank: u32,
    /// Costs and faults.
    pub settings: &'a SimSettings,
}

/// Loads a simulated model. Vocabulary size, context length, end-of-sequence ids and audio input come from a
/// checkpoint's config.
pub fn load(options: &SimOptions<'_>) -> Result<Box<dyn Model>, LoadError> {
    let SimOptions { dir, max_step_tokens, page_tokens, nodes, rank, settings } = *options;
    let file = ConfigFile::read(dir)?;
    let keys: Keys = file.parse()?;
    let needed = |name: &str, value: Option<usize>| match value {
        Some(value) if value > 0 => Ok(value),
        _ => Err(file.invalid(format!("{name}: must be at least 1"))),
    };
    let (text, audio) = (thinker::declaration(page_tokens, BYTES_PER_TOKEN)?, audio::of(&file)?);
    let held = audio.map_or(HeldNodes { thinker: true, encoder: false }, |_| HeldNodes::of(nodes));
    Ok(Box::new(Sim {
        declaration: audio.map_or(Ok(text.clone()), |audio| thinker::with_audio(&text, audio))?,
        held,
        audio,
        limits: Limits {
            vocab_size: needed("vocab_size", keys.vocab_size)?,
            max_context_tokens: needed("max_position_embeddings", keys.max_position_embeddings)?,
            eos_token_ids: eos_token_ids(dir, keys.eos_token_id)?,
            max_step_tokens,
            steps_in_flight: 1,
        },
        clock: SimClock::new(settings, rank),
        settings: settings.clone(),
        page_tokens,
        pool: Vec::new(),
        step_hook: None,
        hidden: Vec::new(),
        in_flight: None,
        spare: LogitResults::default(),
        steps: 0,
    }))
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

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn step_bytes(&self) -> u64 {
        (self.limits.max_step_tokens * BYTES_PER_TOKEN) as u64
    }

    fn page_bytes(&self) -> usize {
        self.page_tokens * BYTES_PER_TOKEN
    }

    fn allocate_planes(&mut self, pages: usize, _: usize) -> Result<(), DeviceError> {
        self.pool = vec![0; pages * self.page_tokens];
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        PageLayout {
            page_tokens: self.page_tokens,
            planes: vec![PlaneLayout {
                name: KV_PLANE.into(),
                place: PlanePlace::Pages { ratio: 1 },
                sections: vec![Section { units: 1, unit_bytes: self.page_bytes() }],
                format: "simulated: digests".into(),
            }],
        }
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        Pool { digests: &mut self.pool, page_tokens: self.page_tokens }.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        Pool { digests: &mut self.pool, page_tokens: self.page_tokens }.write_pages(pages, data)
    }

    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        self.step_hook = Some(hook);
    }

    fn has_thinker(&self) -> bool {
        self.held.thinker
    }

    fn encode(&mut self, walk: WalkId, data: &[u8], out: &mut Vec<f32>) -> Result<(), DeviceError> {
        match self.audio {
            Some(audio) if self.held.encoder && self.declaration.encodes(walk) => {
                let tokens = data.len().div_ceil(audio.bytes_per_token);
                self.begin(
                    &[RowInputs {
                        first_token: 0,
                        tokens,
                        start: 0,
                        slot: SlotId::NULL,
                        continues: false,
                        block_table: &[],
                    }],
                    &[],
                )?;
                audio::encode(data, audio, out);
                Ok(())
            }
            _ => Err(DeviceError::Misuse(format!("walk {walk} passes no encoder of this worker"))),
        }
    }

    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        if self.in_flight.is_some() {
            return Err(DeviceError::Misuse("the step before is not collected yet".into()));
        }
        let (tokens, limit) = (inputs.token_ids.len(), self.limits.max_step_tokens);
        if tokens > limit {
            return Err(DeviceError::Misuse(format!("a step of {tokens} tokens, the limit is {limit}")));
        }
        self.begin(inputs.rows, inputs.token_ids)?;
        self.hidden.clear();
        let width = self.audio.map_or(1, |audio| audio.width);
        let mut meanings = embeddings
            .iter()
            .flat_map(|rows| (rows.first_token..).zip(rows.values.chunks(width).map(audio::meaning)))
            .peekable();
        let mut wanted = inputs.logit_rows.iter().copied().peekable();
        for row in inputs.rows {
            let mut digest = match row.start.checked_sub(1) {
                Some(before) => self.pool[self.pool_index(row, before)?],
                None => digest::EMPTY,
            };
            for index in 0..row.tokens {
                let token = row.first_token + index;
                digest = match meanings.next_if(|(index, _)| *index == token) {
                    Some((_, meaning)) => digest::mix(digest ^ meaning),
                    None => digest::extend(digest, inputs.token_ids[token]),
                };
                let pool_index = self.pool_index(row, row.start + index)?;
                self.pool[pool_index] = digest;
                while wanted.next_if_eq(&token).is_some() {
                    self.hidden.push(digest);
                }
            }
        }
        self.in_flight = Some(std::mem::take(&mut self.spare));
        Ok(())
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        let mut results = self.in_flight.take().ok_or_else(no_step)?;
        for (index, row) in wanted.sample {
            let hidden = *self.hidden.get(*index).ok_or_else(|| no_row(*index))?;
            results.sampled.push(Ok(self.sample(hidden, row)));
        }
        for (index, row) in wanted.score {
            self.hidden.get(*index).ok_or_else(|| no_row(*index))?;
            results.scores.push(Ok(self.score(row.top)));
        }
        self.in_flight = Some(results);
        Ok(())
    }

    fn collect(&mut self, _: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        let mut results = self.in_flight.take().ok_or_else(no_step)?;
        out.append(&mut results);
        self.spare = results;
        Ok(true)
    }

    fn follow_logits(&mut self, _: &WantedRows) -> Result<(), DeviceError> {
        Err(DeviceError::Misuse("the simulated device is not in a group".into()))
    }
}

/// The KV pool, whose pages can be read and written at any time, even during a step.
struct Pool<'a> {
    digests: &'a mut [u64],
    page_tokens: usize,
}

impl PausedPages for Pool<'_> {
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        for page in pages {
            let digests = self.digests.chunks_exact(self.page_tokens).nth(page.0 as usize);
            out.extend(digests.ok_or_else(|| no_page(*page))?.iter().flat_map(|digest| digest.to_le_bytes()));
        }
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        let wanted = pages.len() * self.page_tokens * BYTES_PER_TOKEN;
        if data.len() != wanted {
            return Err(DeviceError::Misuse(format!("{} bytes for pages of {wanted}", data.len())));
        }
        let page_bytes = self.page_tokens * BYTES_PER_TOKEN;
        for (page, data) in pages.iter().zip(data.chunks_exact(page_bytes)) {
            let digests = self.digests.chunks_exact_mut(self.page_tokens).nth(page.0 as usize);
            for (digest, bytes) in digests.ok_or_else(|| no_page(*page))?.iter_mut().zip(data.as_chunks().0) {
                *digest = u64::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }
}

impl Sim {
    /// Waits as long as a step with these rows takes, then fails the step if the settings say so.
    fn begin(&mut self, rows: &[RowInputs<'_>], token_ids: &[u32]) -> Result<(), DeviceError> {
        let Self { clock, pool, page_tokens, step_hook, .. } = self;
        let may_have_work = step_hook.as_ref().is_some_and(|hook| hook.may_have_work());
        clock.pass(rows, if may_have_work { PAUSE } else { Duration::MAX }, || match step_hook {
            Some(hook) => hook.run(&mut Pool { digests: pool, page_tokens: *page_tokens }),
            None => Ok(()),
        })?;
        let step = self.steps;
        self.steps += 1;
        self.fail(step, token_ids)
    }

    /// Applies the settings' faults to this step.
    fn fail(&self, step: u64, token_ids: &[u32]) -> Result<(), DeviceError> {
        let SimSettings { fail_every, fail_on_token, lose_after, hang_after, .. } = &self.settings;
        if hang_after.is_some_and(|after| step > after) {
            clock::hang();
        }
        if lose_after.is_some_and(|after| step > after) {
            return Err(DeviceError::Lost(format!("simulated, in step {step}")));
        }
        if fail_every.is_some_and(|every| step > 0 && step.is_multiple_of(every)) {
            return Err(DeviceError::Misuse(format!("simulated, in step {step}")));
        }
        match fail_on_token {
            Some(id) if step > 0 && token_ids.contains(id) => {
                Err(DeviceError::Misuse(format!("simulated, by token {id}")))
            }
            _ => Ok(()),
        }
    }

    /// Returns the index into the pool of `position` in the row's request.
    fn pool_index(&self, row: &RowInputs<'_>, position: usize) -> Result<usize, DeviceError> {
        let (page, offset) = (position / self.page_tokens, position % self.page_tokens);
        let index = row.block_table.get(page).map(|page| page.0 as usize * self.page_tokens + offset);
        index.filter(|index| *index < self.pool.len()).ok_or_else(|| {
            DeviceError::Misuse(format!(
                "position {position} has no page in a block table of {}",
                row.block_table.len()
            ))
        })
    }

    /// Samples from a uniform distribution over the tokens that are not forbidden. Temperature 0 ignores the seed. All
    /// other sampling parameters have no effect.
    fn sample(&self, hidden: u64, row: &SampleRow<'_>) -> Sampled {
        let seed = if row.params.temperature > 0.0 { row.params.seed } else { 0 };
        let vocab_size = self.limits.vocab_size as u32;
        let mut token = digest::token(hidden, seed, vocab_size);
        // The engine refuses requests that forbid the whole vocabulary, so the loop finds a token.
        for _ in 0..vocab_size {
            if !row.forbidden.contains(&token) {
                break;
            }
            token = (token + 1) % vocab_size;
        }
        Sampled { token, score: row.logprobs.map(|top| self.score(top)) }
    }

    /// Returns the score of any token: all tokens are equally likely. The lowest ids are reported as the top tokens.
    fn score(&self, top: u32) -> TokenScore {
        let logprob = -(self.limits.vocab_size as f32).ln();
        let top = (0..top.min(self.limits.vocab_size as u32)).map(|id| (id, logprob)).collect();
        TokenScore { logprob, rank: 1, top }
    }
}

fn no_page(page: PageId) -> DeviceError {
    DeviceError::Misuse(format!("page {} is not in the pool", page.0))
}

fn no_step() -> DeviceError {
    DeviceError::Misuse("no step is in flight".into())
}

fn no_row(index: usize) -> DeviceError {
    DeviceError::Misuse(format!("the step has no logit row {index}"))
}

#[cfg(test)]
mod tests;
