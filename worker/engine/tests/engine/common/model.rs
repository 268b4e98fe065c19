//! A test model whose answers are hashes of the tokens in the request's pages.
//!
//! It stores token ids where a real model stores keys and values, so a wrong page, position or row changes every later
//! token. It holds up to [`InFlight::steps`] forwards in flight. It computes each of them at one of the two extreme
//! times that a device may choose: when the forward is enqueued, or when the host waits for it.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Instant,
};

use tutti_kernels::{DeviceError, PageId, Sampled, SlotId, StepInputs, TokenMask, TokenScore};
use tutti_models::{
    EmbeddedRows, Limits, LogitRequests, LogitResults, Model, PageLayout, PausedPages, PlaneLayout,
    PlaneStorage, Section, StepHook,
};
use tutti_proto::declaration::ModelDeclaration;

use super::{PAGE_BYTES, PAGE_TOKENS, VOCAB};

/// Content of unwritten positions of a page.
const NOTHING: u32 = u32::MAX;

/// Maximum number of steps in flight, and the time at which steps are computed: when they are enqueued or, if `is_late`
/// is true, when the host waits for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    pub steps: usize,
    pub is_late: bool,
}

impl InFlight {
    /// One step in flight, as on a CPU.
    pub const ONE: Self = Self { steps: 1, is_late: false };
    /// Every kind of device that the tests run on.
    pub const ALL: [Self; 5] = [
        Self::ONE,
        Self { steps: 1, is_late: true },
        Self { steps: 2, is_late: false },
        Self { steps: 2, is_late: true },
        Self { steps: 3, is_late: true },
    ];
}

/// State that tests inspect and control.
#[derive(Default)]
pub struct Probe {
    pub logit_rows: usize,
    pub tokens: usize,
    /// Number of tokens of each row of more than one token.
    pub long_rows: Vec<usize>,
    /// Largest number of forwards that were in flight together.
    pub most_in_flight: usize,
    pub fail_next: Option<DeviceError>,
    /// Period of refused forwards, among those of several rows.
    pub refuse_every: Option<usize>,
    /// Number of forwards of several rows.
    pub shared: usize,
    /// Token id. A forward that contains this token is refused.
    pub poison: Option<u32>,
    /// A sampling that fails: the seed of its request, and the position of its token.
    pub fail_sampling: Option<(u64, u64)>,
    /// Error that the next `enqueue_logits` returns.
    pub fail_logits: Option<DeviceError>,
    /// Error that the next `collect` returns.
    pub fail_collect: Option<DeviceError>,
    /// Number of rows whose first token the host did not know.
    pub continued: usize,
    /// Called in the pause of each step, before the step hook.
    pub during: Option<Box<dyn FnMut() + Send>>,
}

pub struct Hashing {
    pub declaration: ModelDeclaration,
    pub limits: Limits,
    pub in_flight: InFlight,
    pub probe: Arc<Mutex<Probe>>,
    pages: Vec<[u32; PAGE_TOKENS]>,
    /// The token that each slot sampled last.
    sampled: Vec<u32>,
    step_hook: Option<Box<dyn StepHook>>,
    /// Forwards in flight, the oldest first.
    forwards: VecDeque<Forward>,
}

/// A forward in flight, with copies of its inputs.
#[derive(Default)]
struct Forward {
    token_ids: Vec<u32>,
    rows: Vec<Row>,
    logit_rows: Vec<usize>,
    sample: Vec<(usize, Sample)>,
    /// Index of the logit row, token id and number of alternatives of each score.
    score: Vec<(usize, u32, u32)>,
    is_asked: bool,
    /// `None` until the forward is computed.
    results: Option<LogitResults>,
}

struct Row {
    first_token: usize,
    tokens: usize,
    start: usize,
    slot: SlotId,
    continues: bool,
    pages: Vec<PageId>,
}

struct Sample {
    seed: u64,
    position: u64,
    forbidden: Vec<u32>,
    allowed: Option<TokenMask>,
    logprobs: Option<u32>,
}

pub fn mix(hash: u64, value: u64) -> u64 {
    let mixed = (hash ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 29)
}

pub fn hidden(tokens: impl IntoIterator<Item = u32>) -> u64 {
    tokens.into_iter().fold(1, |hash, token| mix(hash, u64::from(token)))
}

/// Returns the token after a prefix. The token depends on seed and position, as a random draw does.
pub fn choose(hidden: u64, seed: u64, position: u64, forbidden: &[u32]) -> u32 {
    choose_allowed(hidden, seed, position, |token| !forbidden.contains(&token)).expect("a token is left")
}

/// Returns the token after a prefix, of those that may come. `None` if there is none.
pub fn choose_allowed(hidden: u64, seed: u64, position: u64, may_come: impl Fn(u32) -> bool) -> Option<u32> {
    let first = (mix(mix(hidden, seed), position) % u64::from(VOCAB)) as u32;
    (first..VOCAB).chain(0..first).find(|token| may_come(*token))
}

pub fn score(hidden: u64, token: u32, top: u32) -> TokenScore {
    let logprob = |token: u32| -((mix(hidden, u64::from(token)) % 1000) as f32) / 100.0;
    let top = (0..top).map(|token| (token, logprob(token))).collect();
    TokenScore { logprob: logprob(token), rank: 1 + (hidden % 7) as u32, top }
}

struct Pages<'a>(&'a mut [[u32; PAGE_TOKENS]]);

impl PausedPages for Pages<'_> {
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let tokens = pages.iter().flat_map(|page| self.0[page.0 as usize]);
        out.extend(tokens.flat_map(u32::to_le_bytes));
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        let mut tokens = data.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        for page in pages {
            self.0[page.0 as usize] = std::array::from_fn(|_| tokens.next().expect("whole pages"));
        }
        assert_eq!(tokens.next(), None);
        Ok(())
    }
}

impl Hashing {
    pub fn new(
        declaration: ModelDeclaration,
        limits: Limits,
        in_flight: InFlight,
        probe: Arc<Mutex<Probe>>,
    ) -> Self {
        let (pages, sampled, step_hook, forwards) = Default::default();
        Self { declaration, limits, in_flight, probe, pages, sampled, step_hook, forwards }
    }

    /// Computes all forwards in flight up to and including the forward with this index. Pauses inside each forward if
    /// `pauses` is true.
    fn compute_to(&mut self, index: usize, pauses: bool) -> Result<(), DeviceError> {
        for index in 0..=index {
            if self.forwards.get(index).is_some_and(|forward| forward.results.is_none()) {
                self.compute(index, pauses)?;
            }
        }
        Ok(())
    }

    fn compute(&mut self, index: usize, pauses: bool) -> Result<(), DeviceError> {
        let mut during = self.probe.lock().unwrap().during.take();
        let fail_sampling = self.probe.lock().unwrap().fail_sampling;
        let forward = &mut self.forwards[index];
        let (mut hidden_rows, middle) = (vec![], forward.rows.len() / 2);
        for (index, row) in forward.rows.iter().enumerate() {
            // The pause comes after some of the rows and before the others.
            if index == middle && pauses {
                during.iter_mut().for_each(|during| during());
                if let Some(hook) = &mut self.step_hook {
                    hook.run(&mut Pages(&mut self.pages))?;
                }
            }
            if row.continues {
                forward.token_ids[row.first_token] = self.sampled[row.slot.0 as usize];
            }
            // A sampled token is the input of at most one row, because the slot's next row samples another token or
            // none.
            self.sampled[row.slot.0 as usize] = NOTHING;
            for index in 0..row.tokens {
                let token = forward.token_ids[row.first_token + index];
                assert!(token < VOCAB, "a token that was never sampled");
                let position = row.start + index;
                let page = row.pages[position / PAGE_TOKENS].0 as usize;
                self.pages[page][position % PAGE_TOKENS] = token;
            }
            let mine = row.first_token..row.first_token + row.tokens;
            for token in forward.logit_rows.iter().filter(|token| mine.contains(token)) {
                let seen = 0..=row.start + token - row.first_token;
                let read = |position: usize| {
                    let page = row.pages[position / PAGE_TOKENS].0 as usize;
                    self.pages[page][position % PAGE_TOKENS]
                };
                hidden_rows.push((hidden(seen.map(read)), row.slot));
            }
        }
        let mut results = LogitResults::default();
        for (index, row) in &forward.sample {
            let (hidden, slot) = hidden_rows[*index];
            let may_come = |token| {
                !row.forbidden.contains(&token) && row.allowed.as_ref().is_none_or(|mask| mask.allows(token))
            };
            let failure = DeviceError::Misuse("no token to sample".into());
            let Some(token) = choose_allowed(hidden, row.seed, row.position, may_come) else {
                results.sampled.push(Err(failure));
                continue;
            };
            self.sampled[slot.0 as usize] = token;
            let score = row.logprobs.map(|top| score(hidden, token, top));
            let fails = fail_sampling == Some((row.seed, row.position));
            results.sampled.push(if fails { Err(failure) } else { Ok(Sampled { token, score }) });
        }
        for (index, token, top) in &forward.score {
            results.scores.push(Ok(score(hidden_rows[*index].0, *token, *top)));
        }
        forward.results = Some(results);
        self.probe.lock().unwrap().during = during;
        Ok(())
    }
}

impl Model for Hashing {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn describe(&self) -> String {
        "hashing".into()
    }

    fn device_name(&self) -> String {
        "host".into()
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn step_bytes(&self) -> u64 {
        0
    }

    fn page_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn allocate_planes(&mut self, pages: usize, slots: usize) -> Result<(), DeviceError> {
        self.pages = vec![[NOTHING; PAGE_TOKENS]; pages];
        self.sampled = vec![NOTHING; slots];
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        let section = Section { units: 1, unit_bytes: PAGE_TOKENS * size_of::<u32>() };
        let (name, format, sections) = ("kv".into(), "tokens".into(), vec![section]);
        let storage = PlaneStorage::Pages { ratio: 1 };
        PageLayout { page_tokens: PAGE_TOKENS, planes: vec![PlaneLayout { name, storage, sections, format }] }
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.compute_to(self.forwards.len(), false)?;
        Pages(&mut self.pages).read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.compute_to(self.forwards.len(), false)?;
        Pages(&mut self.pages).write_pages(pages, data)
    }

    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        self.step_hook = Some(hook);
    }

    fn forward(&mut self, inputs: &StepInputs<'_>, _: &[EmbeddedRows<'_>]) -> Result<(), DeviceError> {
        let mut probe = self.probe.lock().unwrap();
        if let Some(error) = probe.fail_next.take() {
            return Err(error);
        }
        probe.shared += usize::from(inputs.rows.len() > 1);
        if inputs.rows.len() > 1 && probe.refuse_every.is_some_and(|every| probe.shared.is_multiple_of(every))
        {
            return Err(DeviceError::OutOfMemory { what: "logits", wanted: 9 });
        }
        let known = |row: &tutti_kernels::RowInputs<'_>| {
            row.first_token + usize::from(row.continues)..row.first_token + row.tokens
        };
        let ids = || inputs.rows.iter().flat_map(|row| &inputs.token_ids[known(row)]);
        if probe.poison.is_some_and(|token| ids().any(|id| *id == token)) {
            return Err(DeviceError::OutOfMemory { what: "logits", wanted: 9 });
        }
        assert!(inputs.token_ids.len() <= self.limits.max_step_tokens);
        assert!(inputs.logit_rows.is_sorted_by(|a, b| a < b));
        assert!(inputs.copies.is_empty(), "the model has no slot planes");
        assert!(self.forwards.len() < self.in_flight.steps, "too many forwards in flight");
        assert!(self.forwards.back().is_none_or(|forward| forward.is_asked), "logits were not enqueued");
        probe.logit_rows += inputs.logit_rows.len();
        probe.tokens += inputs.token_ids.len();
        probe.most_in_flight = probe.most_in_flight.max(self.forwards.len() + 1);
        let mut next = 0;
        for (index, row) in inputs.rows.iter().enumerate() {
            assert_eq!(row.first_token, next);
            next += row.tokens;
            for token in row.first_token..next {
                let position = row.start + token - row.first_token;
                assert_eq!(inputs.positions.map(|axis| axis[token]), [position as f32; 3]);
            }
            assert!(inputs.rows[..index].iter().all(|other| other.slot != row.slot), "a slot in two rows");
            assert!(!row.continues || inputs.token_ids[row.first_token] == 0);
            probe.continued += usize::from(row.continues);
            probe.long_rows.extend((row.tokens > 1).then_some(row.tokens));
        }
        assert_eq!(next, inputs.token_ids.len());
        drop(probe);
        let row = |row: &tutti_kernels::RowInputs<'_>| Row {
            first_token: row.first_token,
            tokens: row.tokens,
            start: row.start,
            slot: row.slot,
            continues: row.continues,
            pages: row.block_table.to_vec(),
        };
        self.forwards.push_back(Forward {
            token_ids: inputs.token_ids.to_vec(),
            rows: inputs.rows.iter().map(row).collect(),
            logit_rows: inputs.logit_rows.to_vec(),
            ..Forward::default()
        });
        Ok(())
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        if let Some(error) = self.probe.lock().unwrap().fail_logits.take() {
            return Err(error);
        }
        let forward = self.forwards.back_mut().expect("a forward is in flight");
        assert!(!forward.is_asked, "logits are enqueued once");
        let sample = wanted.sample.iter().map(|(index, row)| {
            let (seed, position) = (row.params.seed, row.position);
            let allowed = row.allowed.cloned();
            let forbidden = row.forbidden.to_vec();
            (*index, Sample { seed, position, forbidden, allowed, logprobs: row.logprobs })
        });
        (forward.sample, forward.is_asked) = (sample.collect(), true);
        forward.score = wanted.score.iter().map(|(index, row)| (*index, row.token, row.top)).collect();
        if self.in_flight.is_late { Ok(()) } else { self.compute_to(self.forwards.len(), true) }
    }

    fn collect(&mut self, _: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        if let Some(error) = self.probe.lock().unwrap().fail_collect.take() {
            return Err(error);
        }
        self.compute_to(0, true)?;
        let forward = self.forwards.pop_front().expect("a forward is in flight");
        out.append(&mut forward.results.expect("the forward is computed"));
        Ok(true)
    }

    fn follow_logits(&mut self, _: &tutti_models::WantedRows) -> Result<(), DeviceError> {
        unreachable!("the model is in no group")
    }
}
