//! Products in int8 and in bfloat16, at the shapes of Qwen3-0.6B.
//!
//! `cargo bench -p tutti-kernels --bench int8 -- [--threads N] [--isa NAME] [--rounds N]`. The two types take turns, so
//! that other work on the machine affects both. Figures are medians; a ratio is the median of the ratios of adjacent
//! turns. Weights are a ring of copies larger than the caches, so that they are read from memory as between layers.
#![allow(clippy::print_stdout)] // The figures are the output.

use std::time::{Duration, Instant};

use clap::Parser;
use tutti_kernels::cpu::{CpuDevice, Isa, Weights};
use tutti_kernels::{Dense, Device, DeviceError, HostMatrix, Linear, Quantize, WeightType};

const HIDDEN: usize = 1024;
const INTERMEDIATE: usize = 3072;
const VOCABULARY: usize = 151_936;
/// Minimum total size of the copies of a matrix, in bytes.
const BEYOND_CACHES: usize = 160 << 20;
/// Approximate duration of a round of one type.
const ROUND: Duration = Duration::from_millis(25);

#[derive(Parser)]
struct Arguments {
    /// Compute threads [default: all cores].
    #[arg(long)]
    threads: Option<usize>,
    /// Instruction path [default: the best of the machine].
    #[arg(long)]
    isa: Option<String>,
    /// Turns of each type.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Number of rows to measure [default: all].
    #[arg(long)]
    rows: Option<usize>,
    /// Added by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), DeviceError> {
    let arguments = Arguments::parse();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let named = |name: &String| Isa::ALL.into_iter().find(|isa| isa.to_string() == *name);
    let isa = arguments.isa.as_ref().and_then(named).unwrap_or_else(Isa::detect);
    let mut device = CpuDevice::new(arguments.threads.unwrap_or(cores), isa)?;
    println!("{}", device.describe());
    println!("{:34} {:>10} {:>10} {:>14} {:>8}", "", "bf16 us", "int8 us", "int8 rate", "speedup");
    for (name, inputs, outputs) in [
        ("qkv", HIDDEN, 4096),
        ("o", 2048, HIDDEN),
        ("gate_up", HIDDEN, 2 * INTERMEDIATE),
        ("down", INTERMEDIATE, HIDDEN),
        ("lm_head", HIDDEN, VOCABULARY),
    ] {
        let bytes: Vec<u8> =
            (0..inputs * outputs).flat_map(|i| half::bf16::from_f32(pattern(i)).to_le_bytes()).collect();
        let source = HostMatrix::new(&bytes, WeightType::Bf16, outputs, inputs);
        let mut ring = |quantize| -> Result<Vec<Weights>, DeviceError> {
            let first = device.matrix(&[source], quantize)?;
            let copies = BEYOND_CACHES.div_ceil(device.matrix_bytes(&first) as usize);
            let rest = (1..copies).map(|_| device.matrix(&[source], quantize));
            std::iter::once(Ok(first)).chain(rest).collect()
        };
        let rings = [ring(Quantize::None)?, ring(Quantize::Int8)?];
        drop(bytes);
        for rows in [1, 4, 16, 512] {
            if rows == 512 && outputs == VOCABULARY || arguments.rows.is_some_and(|only| only != rows) {
                continue;
            }
            let mut x = device.tensor(rows, inputs)?;
            x.fill(&(0..rows * inputs).map(pattern).collect::<Vec<_>>())?;
            let mut out = device.tensor(rows, outputs)?;
            let mut times = [Vec::new(), Vec::new()];
            let mut turn = 0;
            for _ in 0..arguments.rounds {
                for (ring, times) in rings.iter().zip(&mut times) {
                    let (began, mut calls) = (Instant::now(), 0);
                    while calls == 0 || began.elapsed() < ROUND {
                        turn += 1;
                        device.linear(Linear::plain(&x, &ring[turn % ring.len()]), &mut out)?;
                        calls += 1;
                    }
                    times.push(began.elapsed().as_secs_f64() / f64::from(calls));
                }
            }
            let ratio = median(times[0].iter().zip(&times[1]).map(|(bf16, int8)| bf16 / int8).collect());
            let [bf16, int8] = times.map(median);
            let (rate, unit) = if rows == 512 {
                (2.0 * (rows * inputs * outputs) as f64, "GOP/s")
            } else {
                (device.matrix_bytes(&rings[1][0]) as f64, "GB/s")
            };
            println!(
                "{:34} {:>10.1} {:>10.1} {:>8.1} {unit:5} {ratio:>8.2}",
                format!("{name} {inputs}x{outputs}, {rows} rows"),
                bf16 * 1e6,
                int8 * 1e6,
                rate / int8 / 1e9,
            );
        }
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
