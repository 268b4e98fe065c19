//! A test model whose answers are hashes of the tokens in the request's pages.
//!
//! It stores token ids where a real model stores keys and values, so a wrong page, position or row changes every later
//! token.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use tutti_engine::{Engine, EngineSettings};
use tutti_kernels::{DeviceError, PageId, Sampled, StepInputs, TokenScore};
use tutti_models::{
    EmbeddedRows, Limits, LogitRequests, LogitResults, Model, PageLayout, PausedPages, PlaneLayout,
    PlanePlace, Section, StepHook,
};
use tutti_proto::{
    Rank,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, NodeId, Plane, PlaneKind, Walk, WalkId, WalkKind},
};
use tutti_settings::ByteSize;

pub const PREFILL: u32 = 0;
pub const DECODE: u32 = 1;
pub const MIXED: u32 = 2;
pub const VOCAB: u32 = 500;
pub const CONTEXT: usize = 256;
pub const PAGE_TOKENS: usize = 4;
const PAGE_BYTES: usize = 64;
/// Content of unwritten slots.
const NOTHING: u32 = u32::MAX;

/// State that tests inspect and control.
#[derive(Default)]
pub struct Probe {
    pub logit_rows: usize,
    pub tokens: usize,
    pub fail_next: Option<DeviceError>,
    /// Token whose computation fails.
    pub poison: Option<u32>,
    /// Called in the pause of each step.
    pub during: Option<Box<dyn FnMut() + Send>>,
}

struct Hashing {
    declaration: ModelDeclaration,
    limits: Limits,
    pages: Vec<[u32; PAGE_TOKENS]>,
    step_hook: Option<Box<dyn StepHook>>,
    /// One value per logit row of the step.
    hidden: Vec<u64>,
    results: LogitResults,
    probe: Arc<Mutex<Probe>>,
}

fn mix(hash: u64, value: u64) -> u64 {
    let mixed = (hash ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 29)
}

fn hidden(tokens: impl IntoIterator<Item = u32>) -> u64 {
    tokens.into_iter().fold(1, |hash, token| mix(hash, u64::from(token)))
}

/// Token after a prefix. It depends on seed and position, as a random number does.
fn choose(hidden: u64, seed: u64, position: u64, forbidden: &[u32]) -> u32 {
    let mut token = (mix(mix(hidden, seed), position) % u64::from(VOCAB)) as u32;
    while forbidden.contains(&token) {
        token = (token + 1) % VOCAB;
    }
    token
}

fn score(hidden: u64, token: u32, top: u32) -> TokenScore {
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

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn step_bytes(&self) -> u64 {
        0
    }

    fn page_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn allocate_planes(&mut self, pages: usize, _: usize) -> Result<(), DeviceError> {
        self.pages = vec![[NOTHING; PAGE_TOKENS]; pages];
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        let section = Section { units: 1, unit_bytes: PAGE_TOKENS * size_of::<u32>() };
        let (name, format, sections) = ("kv".into(), "tokens".into(), vec![section]);
        let place = PlanePlace::Pages { ratio: 1 };
        PageLayout { page_tokens: PAGE_TOKENS, planes: vec![PlaneLayout { name, place, sections, format }] }
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        Pages(&mut self.pages).read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        Pages(&mut self.pages).write_pages(pages, data)
    }

    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        self.step_hook = Some(hook);
    }

    fn forward(&mut self, inputs: &StepInputs<'_>, _: &[EmbeddedRows<'_>]) -> Result<(), DeviceError> {
        let mut probe = self.probe.lock().expect("no thread panicked");
        if let Some(error) = probe.fail_next.take() {
            return Err(error);
        }
        if probe.poison.is_some_and(|token| inputs.token_ids.contains(&token)) {
            return Err(DeviceError::OutOfMemory { what: "logits", wanted: 9 });
        }
        assert!(inputs.token_ids.len() <= self.limits.max_step_tokens);
        assert!(inputs.logit_rows.is_sorted_by(|a, b| a < b));
        probe.logit_rows += inputs.logit_rows.len();
        probe.tokens += inputs.token_ids.len();
        let mut during = probe.during.take();
        drop(probe);
        let mut next = 0;
        self.hidden.clear();
        for (index, row) in inputs.rows.iter().enumerate() {
            // Some rows are computed before this call and some after it.
            if index == inputs.rows.len() / 2 {
                during.iter_mut().for_each(|during| during());
                if let Some(hook) = &mut self.step_hook {
                    hook.run(&mut Pages(&mut self.pages))?;
                }
            }
            assert_eq!(row.first_token, next);
            next += row.tokens;
            for index in 0..row.tokens {
                let position = row.start + index;
                assert_eq!(inputs.positions.map(|axis| axis[row.first_token + index]), [position as f32; 3]);
                let page = row.block_table[position / PAGE_TOKENS].0 as usize;
                self.pages[page][position % PAGE_TOKENS] = inputs.token_ids[row.first_token + index];
            }
            let mine = row.first_token..next;
            for token in inputs.logit_rows.iter().filter(|token| mine.contains(token)) {
                let seen = 0..=row.start + token - row.first_token;
                let read = |position: usize| {
                    let page = row.block_table[position / PAGE_TOKENS].0 as usize;
                    self.pages[page][position % PAGE_TOKENS]
                };
                self.hidden.push(hidden(seen.map(read)));
            }
        }
        assert_eq!(next, inputs.token_ids.len());
        self.probe.lock().expect("no thread panicked").during = during;
        Ok(())
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        let out = &mut self.results;
        for (index, row) in wanted.sample {
            let hidden = self.hidden[*index];
            let token = choose(hidden, row.params.seed, row.position, row.forbidden);
            let score = row.logprobs.map(|top| score(hidden, token, top));
            out.sampled.push(Ok(Sampled { token, score }));
        }
        for (index, row) in wanted.score {
            out.scores.push(Ok(score(self.hidden[*index], row.token, row.top)));
        }
        Ok(())
    }

    fn collect(&mut self, _: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        out.append(&mut self.results);
        Ok(true)
    }

    fn follow_logits(&mut self, _: &tutti_models::WantedRows) -> Result<(), DeviceError> {
        unreachable!("the model is in no group")
    }
}

pub fn settings() -> EngineSettings {
    EngineSettings {
        max_step_tokens: 16,
        max_running_requests: 8,
        kv_cache_memory: Some(ByteSize(129 * PAGE_BYTES as u64)),
        ..EngineSettings::default()
    }
}

pub fn model() -> (Box<dyn Model>, Arc<Mutex<Probe>>) {
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    let batched_by = WalkId(MIXED);
    let walks = vec![
        walk("prefill_text", WalkKind::Chunkable { batched_by }),
        walk("thinker_decode", WalkKind::Decode { batched_by }),
        walk("thinker_step", WalkKind::Mixed),
    ];
    let kind = PlaneKind::Paged { page_tokens: PAGE_TOKENS as u32, ratio: 1, bytes_per_entry: 16 };
    let planes = vec![Plane { name: "kv".into(), kind }];
    let probe = Arc::default();
    let model = Hashing {
        declaration: ModelDeclaration::new(vec!["thinker".into()], walks, planes)
            .expect("the declaration is valid"),
        limits: Limits {
            vocab_size: VOCAB as usize,
            max_context_tokens: CONTEXT,
            eos_token_ids: vec![],
            max_step_tokens: 64,
            steps_in_flight: 1,
        },
        pages: vec![],
        step_hook: None,
        hidden: vec![],
        results: LogitResults::default(),
        probe: Arc::clone(&probe),
    };
    (Box::new(model), probe)
}

pub fn engine(settings: &EngineSettings) -> (Engine, Arc<Mutex<Probe>>) {
    engine_with_queue(settings, 64)
}

pub fn engine_with_queue(
    settings: &EngineSettings,
    max_waiting_requests: usize,
) -> (Engine, Arc<Mutex<Probe>>) {
    let (model, probe) = model();
    (Engine::new(model, Rank(0), settings, max_waiting_requests).expect("sound settings"), probe)
}

/// A request for `max_tokens` tokens after a prompt that no other request has.
pub fn launch(request: u64, prompt: usize, max_tokens: u32) -> pb::LaunchGraph {
    pb::LaunchGraph {
        key: Some(pb::GraphKey { request, incarnation: 0, graph: 0 }),
        walks: vec![PREFILL, DECODE],
        spec: Some(pb::RequestSpec {
            prompt: (0..prompt as u64)
                .map(|index| ((request * 131 + index * 17) % u64::from(VOCAB)) as u32)
                .collect(),
            sampling: Some(pb::Sampling {
                temperature: 1.0,
                top_p: 1.0,
                repetition_penalty: 1.0,
                seed: request + 1000,
                ..Default::default()
            }),
            stopping: Some(pb::Stopping { max_tokens, ..Default::default() }),
            logprobs: None,
            prompt_logprobs: None,
            priority: 0,
            media: vec![],
        }),
        ..Default::default()
    }
}

/// Correct results of a request, computed from its own tokens alone.
pub struct Expected {
    pub output: Vec<u32>,
    pub logprobs: Vec<pb::TokenLogprob>,
    pub prompt_logprobs: Vec<pb::TokenLogprob>,
}

pub fn expected(launch: &pb::LaunchGraph) -> Expected {
    let spec = launch.spec.clone().expect("the launch has a spec");
    let (seed, max_tokens) =
        (spec.sampling.map_or(0, |s| s.seed), spec.stopping.map_or(0, |s| s.max_tokens as usize));
    let wire = |score: TokenScore| pb::TokenLogprob {
        logprob: score.logprob,
        rank: score.rank,
        top: score.top.into_iter().map(|(token_id, logprob)| pb::TopLogprob { token_id, logprob }).collect(),
    };
    let mut tokens = spec.prompt.clone();
    let prompt_logprobs = (1..tokens.len())
        .map(|index| {
            wire(score(
                hidden(tokens[..index].iter().copied()),
                tokens[index],
                spec.prompt_logprobs.unwrap_or(0),
            ))
        })
        .collect();
    let mut logprobs = Vec::new();
    for _ in 0..max_tokens {
        let hidden = hidden(tokens.iter().copied());
        let token = choose(hidden, seed, tokens.len() as u64, &[]);
        logprobs.push(wire(score(hidden, token, spec.logprobs.unwrap_or(0))));
        tokens.push(token);
    }
    Expected { output: tokens.split_off(spec.prompt.len()), logprobs, prompt_logprobs }
}
