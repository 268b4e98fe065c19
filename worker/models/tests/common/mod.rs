//! Fixtures: small checkpoints, and a driver that runs requests through a model in pages, chunks and batches.

#![allow(dead_code, reason = "no test file uses all of it")]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

pub mod families;
pub mod goldens;
pub mod group;

use std::{collections::BTreeMap, fs, ops::Range, path::Path};

use safetensors::tensor::{Dtype, TensorView};
use tutti_kernels::{
    PageId, RowInputs, SampleRow, SamplingParams, ScoreRow, SlotCopy, SlotId, StepInputs, TokenScore,
    cpu::{CpuDevice, Isa},
};
use tutti_models::{
    DecoderDevice, EmbeddedRows, KvCacheDtype, LoadError, LoadFormat, LoadOptions, LogitRequests,
    LogitResults, Model, Quantize, load,
};

pub const PAGE_TOKENS: usize = 16;
pub const MAX_STEP_TOKENS: usize = 2048;
pub const PAGES: usize = 256;
pub const SLOTS: usize = 16;

pub fn device() -> CpuDevice {
    CpuDevice::new(1, Isa::detect()).unwrap()
}

/// Returns a device that makes no screen (a compact copy) of the LM head, so that weights take as many bytes as in the
/// checkpoint.
pub fn unscreened_device() -> CpuDevice {
    device().with_screened_head(false)
}

pub fn try_load(dir: &Path, load_format: LoadFormat) -> Result<Box<dyn Model>, LoadError> {
    try_load_on(device(), dir, load_format)
}

pub fn try_load_on(
    device: impl DecoderDevice,
    dir: &Path,
    load_format: LoadFormat,
) -> Result<Box<dyn Model>, LoadError> {
    try_load_as(device, dir, load_format, Quantize::None)
}

pub fn try_load_as(
    device: impl DecoderDevice,
    dir: &Path,
    load_format: LoadFormat,
    quantize: Quantize,
) -> Result<Box<dyn Model>, LoadError> {
    try_load_with(device, &options(dir, load_format, quantize))
}

/// Returns the options of [`try_load_as`].
pub fn options(dir: &Path, load_format: LoadFormat, quantize: Quantize) -> LoadOptions {
    LoadOptions {
        dir: dir.into(),
        load_format,
        quantize,
        kv_cache_dtype: KvCacheDtype::Auto,
        max_step_tokens: MAX_STEP_TOKENS,
        page_tokens: PAGE_TOKENS,
        expert_parallel: false,
        nodes: None,
        seed: 11,
    }
}

pub fn try_load_with(device: impl DecoderDevice, options: &LoadOptions) -> Result<Box<dyn Model>, LoadError> {
    let mut last = None;
    let model = load(options, device, &mut |progress| last = Some(progress))?;
    let last = last.unwrap();
    assert_eq!(last.done, last.total, "progress ends at the whole");
    Ok(model)
}

pub fn loaded(dir: &Path, load_format: LoadFormat) -> Box<dyn Model> {
    let mut model = try_load(dir, load_format).unwrap();
    model.allocate_planes(PAGES, SLOTS).unwrap();
    model
}

pub fn loaded_as(dir: &Path, load_format: LoadFormat, quantize: Quantize) -> Box<dyn Model> {
    let mut model = try_load_as(device(), dir, load_format, quantize).unwrap();
    model.allocate_planes(PAGES, SLOTS).unwrap();
    model
}

/// The media of a prompt.
#[derive(Clone, Default)]
pub struct Media {
    /// Positions of the prompt's tokens. A token without an entry is at its index plus `delta`.
    pub positions: Vec<[f32; 3]>,
    pub delta: f32,
    /// Tokens that stand for media, with the width of their rows and the rows.
    pub rows: Vec<(Range<usize>, usize, Vec<f32>)>,
}

impl Media {
    fn at(&self, index: usize) -> [f32; 3] {
        self.positions.get(index).copied().unwrap_or([index as f32 + self.delta; 3])
    }

    /// Returns the rows of these tokens, the first of which is token `first` of its step.
    fn embedded(&self, tokens: &Range<usize>, first: usize) -> impl Iterator<Item = EmbeddedRows<'_>> {
        let tokens = tokens.clone();
        self.rows.iter().filter_map(move |(own, width, values)| {
            let (start, end) = (own.start.max(tokens.start), own.end.min(tokens.end));
            (start < end).then(|| EmbeddedRows {
                first_token: first + start - tokens.start,
                width: *width,
                values: &values[(start - own.start) * width..(end - own.start) * width],
            })
        })
    }
}

/// A running request.
#[derive(Clone)]
pub struct Request {
    pub media: Media,
    pub tokens: Vec<u32>,
    /// Number of tokens whose keys and values are in the pages.
    pub computed: usize,
    pub pages: Vec<PageId>,
    pub slot: SlotId,
    /// Scores of all prompt tokens after the first, with the whole vocabulary as top tokens.
    pub scores: Vec<TokenScore>,
}

/// Returns one request per prompt, each with its own pages. Page ids descend, so that no block table is in ascending
/// order.
pub fn requests(prompts: &[&[u32]]) -> Vec<Request> {
    let mut free: Vec<PageId> = (1..PAGES as u32).map(PageId).collect();
    let request = |(slot, prompt): (u32, &&[u32])| Request {
        media: Media::default(),
        tokens: prompt.to_vec(),
        computed: 0,
        pages: (0..(prompt.len() + 64).div_ceil(PAGE_TOKENS)).map(|_| free.pop().unwrap()).collect(),
        slot: SlotId(slot),
        scores: Vec::new(),
    };
    (1..).zip(prompts).map(request).collect()
}

fn greedy() -> SamplingParams {
    SamplingParams::GREEDY
}

/// Runs one step over all requests, with at most `chunk` tokens of each. Scores every prompt token. If the step
/// computes a request's last token, appends a greedy token to the request.
pub fn step(model: &mut dyn Model, requests: &mut [Request], chunk: usize) {
    step_with(model, requests, chunk, &[]);
}

/// Runs [`step`] with slot copies.
pub fn step_with(model: &mut dyn Model, requests: &mut [Request], chunk: usize, copies: &[SlotCopy]) {
    let vocab = model.limits().vocab_size as u32;
    let (mut ids, mut positions, mut rows, mut logit_rows) =
        (vec![], [vec![], vec![], vec![]], vec![], vec![]);
    let mut embedded = vec![];
    for request in requests.iter() {
        let tokens = chunk.min(request.tokens.len() - request.computed);
        let range = request.computed..request.computed + tokens;
        logit_rows.extend(ids.len()..ids.len() + tokens);
        rows.push(RowInputs {
            first_token: ids.len(),
            tokens,
            start: range.start,
            slot: request.slot,
            continues: false,
            block_table: &request.pages,
        });
        embedded.extend(request.media.embedded(&range, ids.len()));
        for axes in range.clone().map(|index| request.media.at(index)) {
            positions.iter_mut().zip(axes).for_each(|(positions, axis)| positions.push(axis));
        }
        ids.extend_from_slice(&request.tokens[range]);
    }
    // A request's state starts as zeros, which a copy of the null slot sets.
    let begin = |request: &&Request| model.declaration().has_slots() && request.computed == 0;
    let begun = requests.iter().filter(begin);
    let zeros = begun.map(|request| SlotCopy { from: SlotId::NULL, to: request.slot });
    let copies: Vec<SlotCopy> = copies.iter().copied().chain(zeros).collect();
    let inputs = StepInputs {
        token_ids: &ids,
        positions: positions.each_ref().map(Vec::as_slice),
        rows: &rows,
        copies: &copies,
        logit_rows: &logit_rows,
        shape: None,
    };
    model.forward(&inputs, &embedded).unwrap();

    let params = greedy();
    let (mut sample, mut score) = (vec![], vec![]);
    for (request, row) in requests.iter().zip(&rows) {
        for i in 0..row.tokens {
            let (at, next) = (row.first_token + i, row.start + i + 1);
            if let Some(&token) = request.tokens.get(next) {
                score.push((at, ScoreRow { token, top: vocab }));
            } else {
                let (position, prompt) = (next as u64, &request.tokens[..]);
                let params = &params;
                sample.push((
                    at,
                    SampleRow {
                        params,
                        prompt,
                        output: &[],
                        forbidden: &[],
                        allowed: None,
                        position,
                        logprobs: None,
                    },
                ));
            }
        }
    }
    let mut out = LogitResults::default();
    model.read_logits(&LogitRequests { sample: &sample, score: &score }, &mut out).unwrap();

    let advances: Vec<usize> = rows.iter().map(|row| row.tokens).collect();
    let (mut sampled, mut scores) =
        (out.sampled.into_iter().map(Result::unwrap), out.scores.into_iter().map(Result::unwrap));
    for (request, tokens) in requests.iter_mut().zip(advances) {
        let scored = tokens.min(request.tokens.len() - 1 - request.computed);
        request.scores.extend(scores.by_ref().take(scored));
        request.computed += tokens;
        if request.computed == request.tokens.len() {
            request.tokens.push(sampled.next().unwrap().token);
        }
    }
    assert!(sampled.next().is_none() && scores.next().is_none(), "as many answers as questions");
}

/// Runs all prompts in the same steps until each has `output` output tokens. Returns each prompt's output and scores.
pub fn generate(
    model: &mut dyn Model,
    prompts: &[&[u32]],
    chunk: usize,
    output: usize,
) -> Vec<(Vec<u32>, Vec<TokenScore>)> {
    generate_with(model, prompts, &[], chunk, output)
}

/// Runs [`generate`] on prompts with media. A prompt without an entry in `media` has none.
pub fn generate_with(
    model: &mut dyn Model,
    prompts: &[&[u32]],
    media: &[&Media],
    chunk: usize,
    output: usize,
) -> Vec<(Vec<u32>, Vec<TokenScore>)> {
    let mut active = requests(prompts);
    active.iter_mut().zip(media).for_each(|(request, media)| request.media = (*media).clone());
    let mut finished: Vec<Option<Request>> = vec![None; prompts.len()];
    let mut prompt_of: Vec<usize> = (0..prompts.len()).collect();
    while !active.is_empty() {
        step(model, &mut active, chunk);
        for i in (0..active.len()).rev() {
            if active[i].tokens.len() == prompts[prompt_of[i]].len() + output {
                finished[prompt_of.remove(i)] = Some(active.remove(i));
            }
        }
    }
    let split = |(request, prompt): (Option<Request>, &&[u32])| {
        let Request { mut tokens, mut scores, .. } = request.unwrap();
        scores.truncate(prompt.len() - 1);
        (tokens.split_off(prompt.len()), scores)
    };
    finished.into_iter().zip(prompts).map(split).collect()
}

/// Returns a small Qwen3 config with `changes` merged into it.
pub fn config(changes: &serde_json::Value) -> serde_json::Value {
    let mut config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 97, "hidden_size": 48,
        "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 1024, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "torch_dtype": "float32",
    });
    for (key, change) in changes.as_object().unwrap() {
        config[key] = change.clone();
    }
    config
}

/// A tensor of a checkpoint: type, shape, bytes.
pub type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// Returns the f32 tensors that [`config`] requires. A value is a function of the tensor's name and the element's
/// index.
pub fn tensors() -> BTreeMap<String, Tensor> {
    let mut tensors = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let elements: usize = shape.iter().product();
        let value = |i: usize| ((i * 37 + name.len() * 11) % 61) as f32 / 61.0 - 0.5;
        let bytes = (0..elements).flat_map(|i| value(i).to_le_bytes()).collect();
        tensors.insert(name, (Dtype::F32, shape.to_vec(), bytes));
    };
    add("model.embed_tokens.weight".into(), &[97, 48]);
    add("lm_head.weight".into(), &[97, 48]);
    add("model.norm.weight".into(), &[48]);
    for layer in 0..2 {
        let mut add_weight =
            |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}.weight"), shape);
        add_weight("input_layernorm", &[48]);
        add_weight("post_attention_layernorm", &[48]);
        add_weight("self_attn.q_proj", &[64, 48]);
        add_weight("self_attn.k_proj", &[32, 48]);
        add_weight("self_attn.v_proj", &[32, 48]);
        add_weight("self_attn.o_proj", &[48, 64]);
        add_weight("self_attn.q_norm", &[16]);
        add_weight("self_attn.k_norm", &[16]);
        add_weight("mlp.gate_proj", &[80, 48]);
        add_weight("mlp.up_proj", &[80, 48]);
        add_weight("mlp.down_proj", &[48, 80]);
    }
    tensors
}

pub fn write_config(dir: &Path, config: &serde_json::Value) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

pub fn write_tensors<'a>(file: &Path, tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>) {
    let views = tensors.into_iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Returns a prompt of `tokens` token ids below 97.
pub fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (i * i * 31 + i * 7 + 3) % 97).collect()
}

/// The output tokens of a prompt, and the whole distribution at each prompt token as (token id, bits of the logprob).
pub type Bits = (Vec<u32>, Vec<Vec<(u32, u32)>>);

/// Converts logprobs to bits, because `==` on floats treats 0 and -0 as equal.
pub fn bits(runs: &[(Vec<u32>, Vec<TokenScore>)]) -> Vec<Bits> {
    let row = |score: &TokenScore| score.top.iter().map(|(token, p)| (*token, p.to_bits())).collect();
    runs.iter().map(|(tokens, scores)| (tokens.clone(), scores.iter().map(row).collect())).collect()
}
