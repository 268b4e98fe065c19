//! Speed of the CPU device's operations, at the shapes of Qwen3-0.6B.
//!
//! `cargo bench -p tutti-kernels --bench ops -- [--threads N] [--isa NAME] [--only TEXT] [--json]`. Weights and pages
//! are rings of copies larger than the caches, so that they are read from memory as between layers. A figure is the
//! median of several rounds, with the best round beside it. `--only` selects figures with TEXT in their name.
#![allow(clippy::print_stdout)] // The figures are the output.

use std::time::{Duration, Instant};

use tutti_kernels::cpu::{CpuDevice, Isa, Planes, Tensor, Weights};
use tutti_kernels::{
    Attention, AttentionShape, Dense, Device, DeviceError, HeadNorms, HostMatrix, KvShape, KvType, Linear,
    PageId, PagedAttention, PlanesShape, Quantize, RopeFrequencies, Rotary, RotateAndStore, RowInputs,
    SampleRow, Sampler, SamplingParams, SlotId, StepInputs, StepResults, WeightType,
};

const HIDDEN: usize = 1024;
const INTERMEDIATE: usize = 3072;
const VOCABULARY: usize = 151_936;
const SHAPE: AttentionShape =
    AttentionShape { heads: 16, kv_heads: 8, head_dim: 128, scale: 0.088_388_35, window: None };
/// Minimum total size of the copies of a matrix, in bytes.
const BEYOND_CACHES: usize = 160 << 20;

/// One line of the table.
struct Figure {
    what: String,
    time: Times,
    rate: f64,
    unit: &'static str,
}

/// Durations of a call.
#[derive(Clone, Copy)]
struct Times {
    median: Duration,
    best: Duration,
}

struct Bench {
    device: CpuDevice,
    /// Text that the names of the measured figures contain.
    only: String,
    figures: Vec<Figure>,
}

fn main() -> Result<(), DeviceError> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = value("--threads").and_then(|threads| threads.parse().ok()).unwrap_or(cores);
    let named = |name: &String| Isa::ALL.into_iter().find(|isa| isa.to_string() == *name);
    let isa = value("--isa").and_then(named).unwrap_or_else(Isa::detect);
    let only = value("--only").cloned().unwrap_or_default();
    let mut bench = Bench { device: CpuDevice::new(threads, isa)?, only, figures: Vec::new() };
    for dtype in [WeightType::Bf16, WeightType::F32] {
        bench.products(dtype)?;
    }
    for dtype in
        [KvType::Full(WeightType::Bf16), KvType::Fp8(WeightType::Bf16), KvType::Full(WeightType::F32)]
    {
        for (rows, context) in [(1, 512), (4, 512), (16, 512), (1, 4096), (4, 4096), (16, 4096)] {
            let rows = vec![(context - 1, 1); rows];
            bench.attention(dtype, &format!("{} decodes at {context}", rows.len()), &rows)?;
        }
        bench.attention(dtype, "prefill of 512", &[(0, 512)])?;
        bench.attention(dtype, "512 tokens after 3584", &[(3584, 512)])?;
        bench.attention(
            dtype,
            "4 decodes at 512, 256 tokens after 1024",
            &[(511, 1), (511, 1), (511, 1), (511, 1), (1024, 256)],
        )?;
    }
    bench.sampling()?;
    let describe = bench.device.describe();
    if arguments.iter().any(|argument| argument == "--json") {
        let figures: Vec<_> = bench
            .figures
            .iter()
            .map(|f| serde_json::json!({"what": f.what, "microseconds": micros(f.time.median), "best": micros(f.time.best), "rate": f.rate, "unit": f.unit}))
            .collect();
        println!("{}", serde_json::json!({"device": describe, "figures": figures}));
        return Ok(());
    }
    println!("{describe}");
    for figure in &bench.figures {
        let Figure { what, time, rate, unit } = figure;
        let best = rate * time.median.as_secs_f64() / time.best.as_secs_f64();
        println!("{what:44} {:>12.1} us {rate:>9.1} {unit} (best {best:.1})", micros(time.median));
    }
    Ok(())
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Times a call, in rounds that take about a third of a second in total.
fn times(mut call: impl FnMut() -> Result<(), DeviceError>) -> Result<Times, DeviceError> {
    call()?;
    let mut times = Vec::new();
    let began = Instant::now();
    while times.len() < 5 || began.elapsed() < Duration::from_millis(300) {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(Times { median: times[times.len() / 2], best: times[0] })
}

impl Bench {
    fn figure(&mut self, what: String, time: Times, amount: f64, unit: &'static str) {
        self.figures.push(Figure { what, time, rate: amount / time.median.as_secs_f64() / 1e9, unit });
    }

    fn products(&mut self, dtype: WeightType) -> Result<(), DeviceError> {
        let qkv = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim;
        for (name, inputs, outputs) in [
            ("qkv", HIDDEN, qkv),
            ("o", SHAPE.heads * SHAPE.head_dim, HIDDEN),
            ("gate_up", HIDDEN, 2 * INTERMEDIATE),
            ("down", INTERMEDIATE, HIDDEN),
            ("lm_head", HIDDEN, VOCABULARY),
        ] {
            let names =
                [1, 4, 16, 512].map(|rows| format!("{dtype:?} {name} {inputs}x{outputs}, {rows} rows"));
            if !names.iter().any(|name| name.contains(&self.only)) {
                continue;
            }
            let bytes = inputs * outputs * dtype.bytes();
            let weights: Vec<u8> = match dtype {
                WeightType::F32 => (0..inputs * outputs).flat_map(|i| pattern(i).to_le_bytes()).collect(),
                _ => (0..inputs * outputs)
                    .flat_map(|i| half::bf16::from_f32(pattern(i)).to_le_bytes())
                    .collect(),
            };
            let source = HostMatrix::new(&weights, dtype, outputs, inputs);
            let copies = BEYOND_CACHES.div_ceil(bytes);
            let matrices: Vec<Weights> = (0..copies)
                .map(|_| self.device.matrix(&[source], Quantize::None))
                .collect::<Result<_, _>>()?;
            drop(weights);
            for (rows, what) in [1, 4, 16, 512].into_iter().zip(names) {
                if rows == 512 && outputs == VOCABULARY || !what.contains(&self.only) {
                    continue;
                }
                let values: Vec<f32> = (0..rows * inputs).map(pattern).collect();
                let mut x = self.device.tensor(rows, inputs)?;
                x.fill(&values)?;
                let mut out = self.device.tensor(rows, outputs)?;
                let mut turn = 0;
                let time = times(|| {
                    turn += 1;
                    self.device.linear(Linear::plain(&x, &matrices[turn % copies]), &mut out)
                })?;
                if rows == 512 {
                    self.figure(what, time, 2.0 * (rows * inputs * outputs) as f64, "GFLOP/s");
                } else {
                    self.figure(what, time, bytes as f64, "GB/s");
                }
            }
        }
        Ok(())
    }

    /// Measures rotation, storing and attention for the rows of a step, each (number of earlier tokens, number of
    /// computed tokens). The layers take turns and exceed the caches, so that pages are read from memory.
    fn attention(&mut self, dtype: KvType, what: &str, rows: &[(usize, usize)]) -> Result<(), DeviceError> {
        const PAGE: usize = 16;
        let name = match dtype {
            KvType::Full(dtype) => format!("{dtype:?}"),
            KvType::Fp8(_) => "Fp8".into(),
        };
        let what = format!("{name} attention, {what}");
        if !what.contains(&self.only) {
            return Ok(());
        }
        let pages: usize = rows.iter().map(|(start, tokens)| (start + tokens).div_ceil(PAGE)).sum();
        let page_bytes = 2 * PAGE * SHAPE.kv_heads * SHAPE.head_dim * dtype.bytes();
        let layers = BEYOND_CACHES.div_ceil(pages * page_bytes);
        let kv = KvShape {
            layers,
            kv_heads: SHAPE.kv_heads,
            head_dim: SHAPE.head_dim,
            page_tokens: PAGE,
            pages: pages + 1,
            dtype,
        };
        let mut planes = self.device.planes(&PlanesShape { kv: Some(kv), ..PlanesShape::default() })?;
        // Pages are assigned to rows in turn, so that no row has adjacent pages.
        let mut tables = vec![Vec::new(); rows.len()];
        let mut next = 1..;
        while tables.iter().map(Vec::len).sum::<usize>() < pages {
            for (table, (start, tokens)) in tables.iter_mut().zip(rows) {
                if table.len() * PAGE < start + tokens {
                    table.extend(next.next().map(PageId));
                }
            }
        }
        for (table, &(start, tokens)) in tables.iter().zip(rows) {
            let (mut qkv, angles) = self.begin(&mut planes, &[(0, start + tokens, table)])?;
            for layer in 0..layers {
                self.device.rotate_and_store(RotateAndStore {
                    qkv: &mut qkv,
                    shape: SHAPE,
                    norms: None,
                    rotary: Rotary { angles: &angles },
                    planes: &mut planes,
                    layer,
                })?;
            }
        }
        let begun: Vec<_> =
            tables.iter().zip(rows).map(|(table, &(start, tokens))| (start, tokens, table)).collect();
        let (mut qkv, angles) = self.begin(&mut planes, &begun)?;
        let tokens: usize = rows.iter().map(|row| row.1).sum();
        let mut out = self.device.tensor(tokens, SHAPE.heads * SHAPE.head_dim)?;
        let mut turn = 0;
        let time = times(|| {
            turn += 1;
            let layer = turn % layers;
            self.device.attention(Attention { qkv: &qkv, shape: SHAPE, planes: &planes, layer }, &mut out)
        })?;
        if tokens == rows.len() {
            self.figure(what, time, (pages * page_bytes) as f64, "GB/s");
            return Ok(());
        }
        let pairs: usize = rows.iter().map(|(start, tokens)| tokens * (2 * start + tokens + 1) / 2).sum();
        self.figure(what, time, 4.0 * (pairs * SHAPE.heads * SHAPE.head_dim) as f64, "GFLOP/s");
        if rows == [(0, 512)] {
            let norm = self.device.vector(&[1.0; SHAPE.head_dim])?;
            let time = times(|| {
                turn += 1;
                let norms = Some(HeadNorms { q: &norm, k: &norm, eps: 1e-6 });
                self.device.rotate_and_store(RotateAndStore {
                    qkv: &mut qkv,
                    shape: SHAPE,
                    norms,
                    rotary: Rotary { angles: &angles },
                    planes: &mut planes,
                    layer: turn % layers,
                })
            })?;
            // q and k are read and written, v is read; k and v are written to pages.
            let (q, k) = (SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim);
            let bytes = tokens * ((2 * q + 3 * k) * size_of::<f32>() + 2 * k * dtype.bytes());
            self.figure(format!("{name} rotate and store, 512 tokens"), time, bytes as f64, "GB/s");
        }
        Ok(())
    }

    /// Begins a step of rows, given as (start, tokens, pages). Returns the step's fused q, k and v, and its angles.
    fn begin(
        &mut self,
        planes: &mut Planes,
        rows: &[(usize, usize, &Vec<PageId>)],
    ) -> Result<(Tensor, Tensor), DeviceError> {
        let mut inputs = Vec::new();
        let mut total = 0;
        for &(start, tokens, block_table) in rows {
            inputs.push(RowInputs {
                first_token: total,
                tokens,
                start,
                slot: SlotId::NULL,
                continues: false,
                block_table,
            });
            total += tokens;
        }
        let (token_ids, positions) = (vec![0; total], vec![0.0; total]);
        let inputs = StepInputs {
            token_ids: &token_ids,
            positions: [&positions[..]; 3],
            rows: &inputs,
            copies: &[],
            logit_rows: &[],
            shape: None,
        };
        self.device.begin_step(&inputs, planes)?;
        let width = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim;
        let mut qkv = self.device.tensor(total, width)?;
        qkv.fill(&(0..total * width).map(pattern).collect::<Vec<_>>())?;
        let mut angles = self.device.tensor(total, SHAPE.head_dim)?;
        let rope = RopeFrequencies { inverse: vec![0.01; SHAPE.head_dim / 2], scale: 1.0, axes: Vec::new() };
        self.device.rope_angles(&rope, &mut angles)?;
        Ok((qkv, angles))
    }

    fn sampling(&mut self) -> Result<(), DeviceError> {
        let greedy = SamplingParams { seed: 1, ..SamplingParams::GREEDY };
        let mut logits = self.device.tensor(1, VOCABULARY)?;
        logits.fill(&(0..VOCABULARY).map(|i| pattern(i) * 100.0).collect::<Vec<_>>())?;
        let sampled = SamplingParams { temperature: 0.8, ..greedy.clone() };
        for (name, params, logprobs) in [
            ("greedy", greedy.clone(), None),
            ("greedy with 5 logprobs", greedy.clone(), Some(5)),
            ("temperature", sampled.clone(), None),
            ("top_k 50, top_p 0.95", SamplingParams { top_k: 50, top_p: 0.95, ..sampled.clone() }, None),
            ("penalties", SamplingParams { repetition_penalty: 1.1, ..sampled }, None),
        ] {
            let row = SampleRow {
                params: &params,
                prompt: &[1; 512],
                output: &[2],
                forbidden: &[],
                allowed: None,
                position: 0,
                logprobs,
            };
            let mut results = StepResults::default();
            if !format!("sample, {name}").contains(&self.only) {
                continue;
            }
            let time = times(|| {
                results.clear();
                self.device.sample(&logits, &[(0, row)])?;
                let mut done = self.device.end_step()?;
                self.device.collect(&mut done, None, &mut results).map(drop)
            })?;
            self.figure(format!("sample, {name}"), time, (VOCABULARY * 4) as f64, "GB/s");
        }
        Ok(())
    }
}

/// Returns small pseudo-random numbers.
fn pattern(index: usize) -> f32 {
    (index.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 65_536.0 - 0.5
}
