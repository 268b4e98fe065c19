//! Tests random slicings of each family: a request that is divided among steps at random, together with other requests,
//! gives the same bits as alone and in one step. Its pages and its state have the same bits, too, and no other memory
//! changes.

use crate::common::{
    PAGE_TOKENS, PAGES, SLOTS,
    families::{checkpoint, deepseek_v4, families},
    loaded_as, prompt,
};
use serde_json::json;
use tutti_kernels::{PageId, RowInputs, SampleRow, SamplingParams, ScoreRow, SlotCopy, SlotId, StepInputs};
use tutti_models::{LoadFormat::Dummy, LogitRequests, LogitResults, Model, Quantize};

const OUTPUT: usize = 5;
/// Byte of the canary pattern. Floats of any type that consist of this byte are NaN.
const CANARY: u8 = 0xff;
/// Lengths in tokens of the prompts that share steps: some close to the size of a page, and some longer than a window.
const PROMPTS: [usize; 6] = [1, 15, 16, 17, 40, 71];

/// A linear congruential generator of random numbers.
struct Random(u32);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as usize % end
    }
}

/// The rule that chooses the number of tokens per request and step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Slices {
    /// All remaining tokens of each request.
    Whole,
    /// One token of each request.
    Ones,
    /// Any number of tokens of each request, possibly none.
    Random,
}

impl Slices {
    fn next(self, random: &mut Random, left: usize) -> usize {
        let most = match self {
            Self::Whole => left,
            Self::Ones => 1,
            Self::Random => [0, 1, 1, 2, 3, 7, 16, 33][random.below(8)],
        };
        most.min(left)
    }
}

struct Request {
    tokens: Vec<u32>,
    end: usize,
    computed: usize,
    slot: SlotId,
    pages: Vec<PageId>,
    /// The whole distribution after each token, as (token id, bits of the logprob).
    scores: Vec<Vec<(u32, u32)>>,
}

impl Request {
    fn has_ended(&self) -> bool {
        self.tokens.len() == self.end
    }
}

/// The result of a request: its tokens, distributions, pages and state.
#[derive(PartialEq)]
struct Left {
    tokens: Vec<u32>,
    scores: Vec<Vec<(u32, u32)>>,
    pages: Vec<u8>,
    state: Vec<u8>,
}

/// The bytes of all pages, and of all slots except the null slot.
struct Memory {
    page_bytes: usize,
    pages: Vec<u8>,
    slots: Vec<Vec<u8>>,
}

impl Memory {
    fn read(model: &mut dyn Model) -> Self {
        let (page_bytes, mut pages) = (model.page_layout().page_bytes(), Vec::new());
        model.read_pages(&page_ids(), &mut pages).unwrap();
        let slots = (1..SLOTS as u32).map(|slot| {
            let mut state = Vec::new();
            model.read_slot(SlotId(slot), &mut state).unwrap();
            state
        });
        Self { page_bytes, pages, slots: slots.collect() }
    }

    fn page(&self, page: PageId) -> &[u8] {
        &self.pages[page.0 as usize * self.page_bytes..][..self.page_bytes]
    }

    fn slot(&self, slot: SlotId) -> &[u8] {
        &self.slots[slot.0 as usize - 1]
    }

    fn of(&self, request: &Request) -> Left {
        Left {
            tokens: request.tokens.clone(),
            scores: request.scores.clone(),
            pages: request.pages.iter().flat_map(|page| self.page(*page)).copied().collect(),
            state: self.slot(request.slot).to_vec(),
        }
    }
}

fn page_ids() -> Vec<PageId> {
    (0..PAGES as u32).map(PageId).collect()
}

fn poison(model: &mut dyn Model) {
    let layout = model.page_layout();
    model.write_pages(&page_ids(), &vec![CANARY; PAGES * layout.page_bytes()]).unwrap();
    for slot in 1..SLOTS as u32 {
        model.write_slot(SlotId(slot), &vec![CANARY; layout.slot_bytes()]).unwrap();
    }
}

/// Runs prompts until their outputs are complete, in steps that follow `slices`. Asserts after each step that requests
/// without a row in the step have unchanged pages and states.
fn run(model: &mut dyn Model, prompts: &[Vec<u32>], slices: Slices, seed: u32) -> Vec<Left> {
    let mut random = Random(seed);
    poison(model);
    let mut pages: Vec<PageId> = page_ids().split_off(1);
    let mut slots: Vec<SlotId> = (1..SLOTS as u32).map(SlotId).collect();
    let mut requests: Vec<Request> = prompts
        .iter()
        .map(|prompt| {
            let end = prompt.len() + OUTPUT;
            let own = (0..end.div_ceil(PAGE_TOKENS)).map(|_| pages.remove(random.below(pages.len())));
            Request {
                tokens: prompt.clone(),
                end,
                computed: 0,
                pages: own.collect(),
                slot: slots.remove(random.below(slots.len())),
                scores: Vec::new(),
            }
        })
        .collect();
    let mut before = Memory::read(model);
    while !requests.iter().all(Request::has_ended) {
        let cut: Vec<(usize, usize)> = (0..requests.len())
            .filter(|&index| !requests[index].has_ended())
            .map(|index| {
                let left = requests[index].tokens.len() - requests[index].computed;
                (index, slices.next(&mut random, left))
            })
            .filter(|(_, tokens)| *tokens > 0)
            .collect();
        if cut.is_empty() {
            continue;
        }
        step(model, &mut requests, &cut);
        let after = Memory::read(model);
        let runs = |index: usize| cut.iter().any(|(running, _)| *running == index);
        let written: Vec<PageId> = (0..requests.len())
            .filter(|&index| runs(index))
            .flat_map(|index| requests[index].pages.clone())
            .collect();
        for page in page_ids().into_iter().filter(|page| !written.contains(page)) {
            assert!(before.page(page) == after.page(page), "{slices:?}, seed {seed}: page {}", page.0);
        }
        for slot in (1..SLOTS as u32).map(SlotId) {
            let in_step = (0..requests.len()).any(|index| runs(index) && requests[index].slot == slot);
            assert!(in_step || before.slot(slot) == after.slot(slot), "{slices:?}, seed {seed}: {slot:?}");
        }
        before = after;
    }
    requests.iter().map(|request| before.of(request)).collect()
}

/// Runs one step. An element of `cut` is a request's index and its number of tokens. Records the distribution after
/// every token.
fn step(model: &mut dyn Model, requests: &mut [Request], cut: &[(usize, usize)]) {
    let vocab = model.limits().vocab_size as u32;
    let has_slots = model.declaration().has_slots();
    let (mut ids, mut positions, mut rows, mut copies) = (vec![], vec![], vec![], vec![]);
    for &(index, tokens) in cut {
        let request = &requests[index];
        let (first_token, start) = (ids.len(), request.computed);
        if has_slots && start == 0 {
            copies.push(SlotCopy { from: SlotId::NULL, to: request.slot });
        }
        let (slot, continues, block_table) = (request.slot, false, &request.pages[..]);
        rows.push(RowInputs { first_token, tokens, start, slot, continues, block_table });
        ids.extend_from_slice(&request.tokens[start..start + tokens]);
        positions.extend((start..start + tokens).map(|position| position as f32));
    }
    let inputs = StepInputs {
        token_ids: &ids,
        positions: [&positions[..]; 3],
        rows: &rows,
        copies: &copies,
        logit_rows: &(0..ids.len()).collect::<Vec<_>>(),
        shape: None,
    };
    model.forward(&inputs, &[]).unwrap();
    let params = SamplingParams { temperature: 0.8, seed: 5, ..SamplingParams::GREEDY };
    let ends = cut.iter().zip(&rows).filter_map(|(&(index, tokens), row)| {
        let request = &requests[index];
        let is_end = request.computed + tokens == request.tokens.len();
        is_end.then_some((row.first_token + tokens - 1, &request.tokens[..]))
    });
    let sample: Vec<(usize, SampleRow<'_>)> = ends
        .map(|(row, prompt)| {
            let position = prompt.len() as u64;
            let (params, output, forbidden) = (&params, &[][..], &[][..]);
            (row, SampleRow { params, prompt, output, forbidden, allowed: None, position, logprobs: None })
        })
        .collect();
    let score: Vec<(usize, ScoreRow)> =
        (0..ids.len()).map(|row| (row, ScoreRow { token: 0, top: vocab })).collect();
    let mut out = LogitResults::default();
    model.read_logits(&LogitRequests { sample: &sample, score: &score }, &mut out).unwrap();
    let mut scores = out.scores.into_iter().map(|score| {
        score.unwrap().top.into_iter().map(|(token, logprob)| (token, logprob.to_bits())).collect()
    });
    let mut sampled = out.sampled.into_iter().map(|token| token.unwrap().token);
    for &(index, tokens) in cut {
        let request = &mut requests[index];
        request.scores.extend(scores.by_ref().take(tokens));
        request.computed += tokens;
        if request.computed == request.tokens.len() {
            request.tokens.push(sampled.next().unwrap());
        }
    }
    assert!(sampled.next().is_none() && scores.next().is_none(), "as many answers as questions");
}

fn slicings_change_no_bit(what: &str, model: &mut dyn Model, seeds: u32) {
    let prompts: Vec<Vec<u32>> = PROMPTS.map(prompt).into();
    let alone: Vec<Left> = prompts
        .iter()
        .map(|prompt| run(model, std::slice::from_ref(prompt), Slices::Whole, 1).remove(0))
        .collect();
    for (prompt, alone) in prompts.iter().zip(&alone) {
        assert_eq!(alone.scores.len(), prompt.len() + OUTPUT - 1, "{what}: each token has a distribution");
        assert!(alone.scores.iter().all(|score| score.len() == 97), "{what}: of the whole vocabulary");
    }
    assert!(alone.windows(2).all(|pair| pair[0].tokens != pair[1].tokens), "{what}: the outputs differ");
    let scripts = [(Slices::Whole, 2), (Slices::Ones, 3)].into_iter();
    for (slices, seed) in scripts.chain((0..seeds).map(|seed| (Slices::Random, 10 + seed))) {
        let mixed = run(model, &prompts, slices, seed);
        for (length, (mixed, alone)) in PROMPTS.iter().zip(mixed.iter().zip(&alone)) {
            let what = format!("{what}, {slices:?} slices, seed {seed}, prompt of {length}");
            assert!(mixed.tokens == alone.tokens, "{what}: other tokens");
            assert!(mixed.scores == alone.scores, "{what}: other distributions");
            assert!(mixed.pages == alone.pages, "{what}: other pages");
            assert!(mixed.state == alone.state, "{what}: another state");
        }
    }
}

#[test]
fn of_each_family_in_f32() {
    for (family, config) in families().into_iter().chain([deepseek_v4()]) {
        let dir = checkpoint(&config, json!({}));
        slicings_change_no_bit(family, &mut *loaded_as(dir.path(), Dummy, Quantize::None), 4);
    }
}

#[test]
fn of_each_family_in_bf16_and_int8() {
    for (family, config) in families().into_iter().chain([deepseek_v4()]) {
        let dir = checkpoint(&config, json!({"torch_dtype": "bfloat16"}));
        for quantize in [Quantize::None, Quantize::Int8] {
            let what = format!("{family}, {quantize:?}");
            slicings_change_no_bit(&what, &mut *loaded_as(dir.path(), Dummy, quantize), 1);
        }
    }
}
