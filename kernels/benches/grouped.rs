//! Products with weights in groups of four and eight bits beside bfloat16 and int8, at the shapes of Qwen3-0.6B.
//!
//! `cargo bench -p tutti-kernels --bench grouped -- [--threads N] [--isa NAME] [--rounds N] [--rows N]`. The kinds take
//! turns, so that other work on the machine affects all. Figures are medians; a ratio is the median of the ratios of
//! adjacent turns. Weights are a ring of copies larger than the caches, so that they are read from memory as between
//! layers.
#![allow(clippy::print_stdout)] // The figures are the output.

use std::time::{Duration, Instant};

use clap::Parser;
use tutti_kernels::cpu::{CpuDevice, Isa, Tensor, Weights};
use tutti_kernels::{
    Dense, Device, DeviceError, GroupOffsets, HostMatrix, Linear, Quantize, QuantizedRows, QuantizedType,
    ScaleType, WeightType,
};

const HIDDEN: usize = 1024;
const INTERMEDIATE: usize = 3072;
/// Minimum total size of the copies of a matrix, in bytes.
const BEYOND_CACHES: usize = 160 << 20;
/// Approximate duration of a round of one kind.
const ROUND: Duration = Duration::from_millis(25);

#[derive(Parser)]
struct Arguments {
    /// Compute threads [default: all cores].
    #[arg(long)]
    threads: Option<usize>,
    /// Instruction path [default: the best of the machine].
    #[arg(long)]
    isa: Option<String>,
    /// Turns of each kind.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Number of rows to measure [default: all].
    #[arg(long)]
    rows: Option<usize>,
    /// Added by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A kind of weights.
struct Kind {
    name: &'static str,
    ring: Vec<Weights>,
    /// True if activations stay in f32.
    full: bool,
}

fn main() -> Result<(), DeviceError> {
    let arguments = Arguments::parse();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let named = |name: &String| Isa::ALL.into_iter().find(|isa| isa.to_string() == *name);
    let isa = arguments.isa.as_ref().and_then(named).unwrap_or_else(Isa::detect);
    let threads = arguments.threads.unwrap_or(cores);
    let mut device = CpuDevice::new(threads, isa)?;
    let mut full = CpuDevice::new(threads, isa)?.with_quantised_activations(false);
    println!("{}", device.describe());
    for (name, inputs, outputs) in [
        ("qkv", HIDDEN, 4096),
        ("o", 2048, HIDDEN),
        ("gate_up", HIDDEN, 2 * INTERMEDIATE),
        ("down", INTERMEDIATE, HIDDEN),
    ] {
        let kinds = kinds(&mut device, &mut full, inputs, outputs)?;
        for rows in [1, 4, 16, 512] {
            if arguments.rows.is_some_and(|only| only != rows) {
                continue;
            }
            println!("{name} {inputs}x{outputs}, {rows} rows");
            measure([&mut device, &mut full], &kinds, (rows, inputs, outputs), arguments.rounds)?;
        }
    }
    Ok(())
}

/// Makes rings of copies of one matrix.
fn kinds(
    device: &mut CpuDevice,
    full: &mut CpuDevice,
    inputs: usize,
    outputs: usize,
) -> Result<Vec<Kind>, DeviceError> {
    let bytes: Vec<u8> =
        (0..inputs * outputs).flat_map(|i| half::bf16::from_f32(pattern(i)).to_le_bytes()).collect();
    let source = HostMatrix::new(&bytes, WeightType::Bf16, outputs, inputs);
    // The bytes of random numbers are also codes. No code of e4m3 is NaN.
    let codes: Vec<u8> = (0..inputs * outputs).map(|i| (pattern(i) * 100.0) as i8 as u8 & 0xf7).collect();
    let scales = vec![0.01; outputs * inputs / 32];
    let zeros = vec![7; scales.len()];
    let rows = |element, group: usize, rows_per_scale, offsets| {
        let stride = inputs * QuantizedType::bits(element) / 8;
        QuantizedRows {
            codes: &codes[..outputs * stride],
            element,
            rows: outputs,
            columns: inputs,
            stride,
            group,
            rows_per_scale,
            scales: &scales[..outputs.div_ceil(rows_per_scale) * inputs.div_ceil(group)],
            scale_type: ScaleType::F32,
            offsets,
        }
    };
    let int4 = |group| rows(QuantizedType::Int4, group, 1, GroupOffsets::None);
    let zeros = &zeros[..outputs * inputs / 128];
    Ok(vec![
        Kind {
            name: "bf16",
            ring: ring(device, |device| device.matrix(&[source], Quantize::None))?,
            full: false,
        },
        Kind {
            name: "int8",
            ring: ring(device, |device| device.matrix(&[source], Quantize::Int8))?,
            full: false,
        },
        Kind {
            name: "int4",
            ring: ring(device, |device| device.matrix(&[source], Quantize::Int4))?,
            full: false,
        },
        Kind {
            name: "int4, groups of 128",
            ring: ring(device, |device| device.quantized_matrix(&[int4(128)]))?,
            full: false,
        },
        Kind {
            name: "int4, zero points",
            ring: ring(device, |device| {
                device.quantized_matrix(&[rows(QuantizedType::Int4, 128, 1, GroupOffsets::ZeroPoints(zeros))])
            })?,
            full: false,
        },
        Kind {
            name: "int4, f32 activations",
            ring: ring(full, |device| device.quantized_matrix(&[int4(32)]))?,
            full: true,
        },
        Kind {
            name: "e2m1",
            ring: ring(full, |device| {
                device.quantized_matrix(&[rows(QuantizedType::E2m1, 32, 1, GroupOffsets::None)])
            })?,
            full: true,
        },
        Kind {
            name: "fp8, blocks of 128",
            ring: ring(full, |device| {
                device.quantized_matrix(&[rows(QuantizedType::E4m3, 128, 128, GroupOffsets::None)])
            })?,
            full: true,
        },
    ])
}

/// Loads copies of a matrix until they exceed the caches.
fn ring(
    device: &mut CpuDevice,
    mut load: impl FnMut(&mut CpuDevice) -> Result<Weights, DeviceError>,
) -> Result<Vec<Weights>, DeviceError> {
    let first = load(device)?;
    let copies = BEYOND_CACHES.div_ceil(device.matrix_bytes(&first) as usize);
    let rest = (1..copies).map(|_| load(device));
    std::iter::once(Ok(first)).chain(rest).collect()
}

fn measure(
    devices: [&mut CpuDevice; 2],
    kinds: &[Kind],
    (rows, inputs, outputs): (usize, usize, usize),
    rounds: usize,
) -> Result<(), DeviceError> {
    let [device, full] = devices;
    let operands = |device: &mut CpuDevice| -> Result<[Tensor; 2], DeviceError> {
        let mut x = device.tensor(rows, inputs)?;
        x.fill(&(0..rows * inputs).map(pattern).collect::<Vec<_>>())?;
        Ok([x, device.tensor(rows, outputs)?])
    };
    let (mut plain, mut exact) = (operands(device)?, operands(full)?);
    let mut times = vec![Vec::new(); kinds.len()];
    let mut turn = 0;
    for _ in 0..rounds {
        for (kind, times) in kinds.iter().zip(&mut times) {
            let (device, [x, out]) =
                if kind.full { (&mut *full, &mut exact) } else { (&mut *device, &mut plain) };
            let (began, mut calls) = (Instant::now(), 0);
            while calls == 0 || began.elapsed() < ROUND {
                turn += 1;
                device.linear(Linear::plain(x, &kind.ring[turn % kind.ring.len()]), out)?;
                calls += 1;
            }
            times.push(began.elapsed().as_secs_f64() / f64::from(calls));
        }
    }
    for (kind, of_kind) in kinds.iter().zip(&times) {
        let ratio = |to: &[f64]| median(to.iter().zip(of_kind).map(|(to, time)| to / time).collect());
        let time = median(of_kind.clone());
        let (rate, unit) = if rows == 512 {
            (2.0 * (rows * inputs * outputs) as f64, "GOP/s")
        } else {
            (device.matrix_bytes(&kind.ring[0]) as f64, "GB/s")
        };
        println!(
            "  {:24} {:>10.1} us {:>8.1} {unit:5} {:>6.2} x bf16 {:>6.2} x int8",
            kind.name,
            time * 1e6,
            rate / time / 1e9,
            ratio(&times[0]),
            ratio(&times[1]),
        );
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns small pseudo-random numbers.
fn pattern(index: usize) -> f32 {
    (index.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 65_536.0 - 0.5
}
