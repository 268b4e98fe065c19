//! Times the kernels of the emulator's tests, without checks and with all checks. Prints the milliseconds of the
//! fastest of several launches on one thread.
//!
//! `cargo run --release -p tutti-emulated-gpu --example speed`

#![allow(clippy::print_stdout)]

use std::time::Instant;
use tutti_emulated_gpu::{Checks, DeviceMemory, Grid, Module, launch};

const ROWS: &str = include_str!("../tests/suite/sources/rows.ptx");
const TILES: &str = include_str!("../tests/suite/sources/tiles.ptx");
const REPETITIONS: usize = 7;

/// A launch to time. `buffers` holds sizes in bytes. A parameter is a buffer's address or a number.
struct Case {
    name: &'static str,
    ptx: &'static str,
    kernel: &'static str,
    buffers: Vec<usize>,
    numbers: Vec<Vec<u8>>,
    blocks: [u32; 3],
    threads: u32,
}

fn cases() -> Vec<Case> {
    let int = |n: i32| n.to_le_bytes().to_vec();
    vec![
        Case {
            name: "normalise 256 rows of 4,096",
            ptx: ROWS,
            kernel: "normalise",
            buffers: vec![256 * 4096 * 2, 4096 * 2, 256 * 4096 * 2],
            numbers: vec![int(4096), 1e-6f32.to_le_bytes().to_vec()],
            blocks: [256, 1, 1],
            threads: 256,
        },
        Case {
            name: "multiply 256 x 256 x 512",
            ptx: TILES,
            kernel: "multiply",
            buffers: vec![256 * 512 * 2, 256 * 512 * 2, 256 * 256 * 4],
            numbers: vec![int(256), int(256), int(512)],
            blocks: [4, 4, 1],
            threads: 128,
        },
        Case {
            name: "mixture of branches, 64 blocks",
            ptx: ROWS,
            kernel: "mixture",
            buffers: vec![64 * 128 * 4],
            numbers: vec![1_000_000_007_u64.to_le_bytes().to_vec()],
            blocks: [64, 1, 1],
            threads: 128,
        },
    ]
}

/// Returns the milliseconds of the fastest launch.
fn time(case: &Case, checks: &Checks) -> Result<f64, Box<dyn std::error::Error>> {
    let memory = if checks.races { DeviceMemory::watched(1 << 28) } else { DeviceMemory::new(1 << 28) };
    let mut module = Module::decode(case.ptx)?;
    module.load(&memory)?;
    let kernel = &module.kernels[case.kernel];
    let mut arguments = Vec::new();
    for &bytes in &case.buffers {
        let address = memory.allocate(bytes as u64)?;
        memory.fill(address, bytes as u64, &[0x80, 0x3f])?;
        arguments.push(address.to_le_bytes().to_vec());
    }
    arguments.extend(case.numbers.iter().cloned());
    let mut parameters = vec![0; kernel.parameter_bytes() as usize];
    for (parameter, argument) in kernel.parameters.iter().zip(&arguments) {
        parameters[parameter.offset as usize..][..argument.len()].copy_from_slice(argument);
    }
    let grid = Grid { blocks: case.blocks, threads: [case.threads, 1, 1], dynamic_shared_bytes: 0 };
    let mut best = f64::INFINITY;
    for _ in 0..REPETITIONS {
        let start = Instant::now();
        launch(&module, kernel, &grid, &parameters, &memory, checks)?;
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let start = Instant::now();
    Module::decode(ROWS)?;
    println!("decoding of rows.ptx: {:.2} ms", start.elapsed().as_secs_f64() * 1e3);
    for case in cases() {
        let plain = time(&case, &Checks { threads: 1, ..Checks::default() })?;
        let checked = time(&case, &Checks { threads: 1, seed: None, races: true, uninitialised: true })?;
        println!("{}: {plain:.2} ms plain, {checked:.2} ms with all checks", case.name);
    }
    Ok(())
}
