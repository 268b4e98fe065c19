//! Runs the kernels in `sources`, compiled by NVIDIA's NVRTC, and compares the results with the same functions on the
//! host.
//!
//! `tests/tools/nvrtc` installs NVRTC. Without NVRTC, the tests use the committed PTX and skip mutants. With
//! `CUDA_TESTS=required`, a missing NVRTC is an error.

use std::path::{Path, PathBuf};
use std::process::Command;
use tutti_emulated_gpu::{Checks, DeviceMemory, Fault, Grid, Module, launch};

/// Architectures whose PTX differs. PTX for 80 converts bf16 by shifts, PTX for 90 by instructions. NVRTC compiles for
/// 100a with a newer front end.
const ARCHITECTURES: [&str; 3] = ["compute_80", "compute_90", "compute_100a"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the committed PTX of a source, which NVRTC compiled for compute_90.
fn committed(source: &str) -> &'static str {
    match source {
        "rows.cu" => include_str!("sources/rows.ptx"),
        _ => include_str!("sources/tiles.ptx"),
    }
}

/// Compiles a source to PTX. Returns none if NVRTC is not installed.
fn compile(source: &str, architecture: &str) -> Option<String> {
    if !root().join("target/nvrtc/lib/libnvrtc.so.13").exists() {
        assert!(
            std::env::var_os("CUDA_TESTS").is_none_or(|value| value != "required"),
            "NVRTC is not installed: run tests/tools/nvrtc"
        );
        eprintln!("NVRTC is not installed: run tests/tools/nvrtc");
        return None;
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/sources").join(source);
    let output = Command::new(root().join("tests/tools/ptx")).arg(file).arg(architecture).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

/// A loaded module on a new GPU.
struct Gpu {
    module: Module,
    memory: DeviceMemory,
}

impl Gpu {
    fn new(ptx: &str, watched: bool) -> Self {
        let memory = if watched { DeviceMemory::watched(1 << 28) } else { DeviceMemory::new(1 << 28) };
        let mut module = Module::decode(ptx).unwrap();
        module.load(&memory).unwrap();
        Gpu { module, memory }
    }

    fn upload(&self, bytes: &[u8]) -> u64 {
        let address = self.memory.allocate(bytes.len() as u64).unwrap();
        self.memory.copy_in(address, bytes).unwrap();
        address
    }

    fn download(&self, address: u64, bytes: usize) -> Vec<u8> {
        assert_eq!(self.memory.first_unwritten(address, bytes as u64).unwrap(), None);
        let mut out = vec![0; bytes];
        self.memory.copy_out(address, &mut out).unwrap();
        out
    }

    fn run(
        &self,
        kernel: &str,
        blocks: [u32; 3],
        threads: u32,
        arguments: &[&[u8]],
        checks: &Checks,
    ) -> Result<(), Box<Fault>> {
        let kernel = &self.module.kernels[kernel];
        assert_eq!(kernel.error, None);
        assert_eq!(arguments.len(), kernel.parameters.len());
        let mut parameters = vec![0; kernel.parameter_bytes() as usize];
        for (argument, place) in arguments.iter().zip(&kernel.parameters) {
            assert_eq!(argument.len(), place.bytes as usize);
            parameters[place.offset as usize..][..argument.len()].copy_from_slice(argument);
        }
        let grid = Grid { blocks, threads: [threads, 1, 1], dynamic_shared_bytes: 0 };
        launch(&self.module, kernel, &grid, &parameters, &self.memory, checks)
    }
}

fn bytes<T: Copy, const N: usize>(values: &[T], of: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| of(v)).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    words(bytes).into_iter().map(f32::from_bits).collect()
}

/// Returns pseudo-random values between -1 and 1 that are exact in bf16.
fn values(count: usize, salt: u32) -> Vec<f32> {
    let mut state = salt.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 24) as f32 / 128.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn brain(values: &[f32]) -> Vec<u8> {
    bytes(values, |v| ((v.to_bits() >> 16) as u16).to_le_bytes())
}

/// Runs `test` on the PTX of each architecture, without checks and with all checks in three orders.
fn everywhere(source: &str, test: impl Fn(&Gpu, &Checks, &str)) {
    for architecture in ARCHITECTURES {
        let ptx = match compile(source, architecture) {
            Some(ptx) => ptx,
            None if architecture == "compute_90" => committed(source).to_owned(),
            None => continue,
        };
        for checks in [Checks::default(), Checks::all(1), Checks::all(2), Checks::all(41)] {
            let name = format!("{source} for {architecture}, {checks:?}");
            test(&Gpu::new(&ptx, checks.races), &checks, &name);
        }
    }
}

#[test]
fn the_committed_ptx_is_what_nvrtc_makes() {
    for source in ["rows.cu", "tiles.cu"] {
        if let Some(ptx) = compile(source, "compute_90") {
            assert!(
                ptx == committed(source),
                "{source}: make it again with tests/tools/ptx {source} compute_90"
            );
        }
    }
}

#[test]
fn rows_are_normalised() {
    let (rows, n) = (5usize, 1000usize);
    let (input, weights) = (values(rows * n, 3), values(n, 4));
    everywhere("rows.cu", |gpu, checks, name| {
        let (x, w) = (gpu.upload(&brain(&input)), gpu.upload(&brain(&weights)));
        let y = gpu.memory.allocate((rows * n * 2) as u64).unwrap();
        let arguments: [&[u8]; 5] = [
            &x.to_le_bytes(),
            &w.to_le_bytes(),
            &y.to_le_bytes(),
            &(n as i32).to_le_bytes(),
            &1e-6f32.to_le_bytes(),
        ];
        gpu.run("normalise", [rows as u32, 1, 1], 192, &arguments, checks).unwrap();
        let found = gpu.download(y, rows * n * 2);
        for (i, found) in found.chunks_exact(2).enumerate() {
            let row = &input[i / n * n..][..n];
            let mean = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / n as f64;
            let exact = f64::from(input[i]) * f64::from(weights[i % n]) / (mean + 1e-6).sqrt();
            let found = f32::from_bits(u32::from(u16::from_le_bytes([found[0], found[1]])) << 16);
            assert!(
                (f64::from(found) - exact).abs() <= exact.abs() / 250.0,
                "{name}: {i}: {found}, not {exact}"
            );
        }
    });
}

#[test]
fn branches_arrays_calls_and_divisions() {
    let divisor = 1_000_000_007_u64;
    let expected = |t: u32| {
        let v = (t * 5 % 8).pow(2) + t;
        match t % 12 {
            0 => v + 100,
            1 => v ^ 7,
            2 => v * 3,
            3 => v.wrapping_sub(9),
            4 => !v,
            5 => v << 3,
            6 => v / 3,
            7 => v % 5,
            8 => {
                let (mut n, mut steps) = (t + 1, 0);
                while n != 1 {
                    n = if n % 2 == 1 { 3 * n + 1 } else { n / 2 };
                    steps += 1;
                }
                steps
            }
            _ => (0x0123_4567_89ab_cdef_u64.wrapping_mul(u64::from(t) + 1) % divisor) as u32,
        }
    };
    everywhere("rows.cu", |gpu, checks, name| {
        let out = gpu.memory.allocate(4 * 300).unwrap();
        gpu.run("mixture", [3, 1, 1], 100, &[&out.to_le_bytes(), &divisor.to_le_bytes()], checks).unwrap();
        for (t, found) in words(&gpu.download(out, 1200)).into_iter().enumerate() {
            // A lane with `t % 3 == 1` votes with all lanes that are active at its vote. PTX does not define which
            // lanes these are. If none of these lanes has an odd value, the lane stores 1.
            let expected = expected(t as u32);
            assert!(found == expected || t % 3 == 1 && found == 1, "{name}: {t}: {found}, not {expected}");
        }
    });
}

#[test]
fn histograms_meet_in_the_last_block() {
    let input: Vec<u32> = (0..5000u32).map(|i| i.wrapping_mul(2_654_435_761) >> 20).collect();
    let mut expected = vec![0u32; 64];
    input.iter().for_each(|&i| expected[i as usize % 64] += 1);
    let total: u32 = expected.iter().enumerate().map(|(i, &n)| i as u32 * n).sum();
    everywhere("rows.cu", |gpu, checks, name| {
        let (x, bins) = (gpu.upload(&bytes(&input, u32::to_le_bytes)), gpu.upload(&[0; 256]));
        let sum = gpu.memory.allocate(4).unwrap();
        let n = (input.len() as i32).to_le_bytes();
        let arguments: [&[u8]; 4] = [&x.to_le_bytes(), &n, &bins.to_le_bytes(), &sum.to_le_bytes()];
        gpu.run("histogram", [7, 1, 1], 96, &arguments, checks)
            .unwrap_or_else(|fault| panic!("{name}: {fault}"));
        assert_eq!(words(&gpu.download(bins, 256)), expected, "{name}");
        assert_eq!(words(&gpu.download(sum, 4)), [total], "{name}");
    });
}

#[test]
fn functions_of_the_library() {
    // For arguments beyond 105,615, the kernel uses the slow reduction of the range.
    let input: Vec<f32> =
        (0..128).map(|i| (i as f32 - 60.0) * if i % 3 == 0 { 12_345.678 } else { 0.37 }).collect();
    everywhere("rows.cu", |gpu, checks, name| {
        let (x, y) = (gpu.upload(&bytes(&input, f32::to_le_bytes)), gpu.memory.allocate(128 * 20).unwrap());
        gpu.run("functions", [2, 1, 1], 64, &[&x.to_le_bytes(), &y.to_le_bytes()], checks).unwrap();
        for (found, &x) in floats(&gpu.download(y, 128 * 20)).chunks_exact(5).zip(&input) {
            let wide = f64::from(x);
            let exact = [wide.sin(), wide.cos(), (wide / 64.0).exp(), (wide.abs() + 0.5).ln(), wide.tanh()];
            for (i, (&found, exact)) in found.iter().zip(exact).enumerate() {
                let off = (f64::from(found) - exact).abs();
                let inside = off <= 5e-6 * exact.abs().max(0.1)
                    || !f64::from(found).is_finite() && exact > f64::from(f32::MAX);
                assert!(inside, "{name}: function {i} of {x}: {found}, not {exact}");
            }
        }
    });
}

#[test]
fn matrices_are_multiplied_on_tensor_cores() {
    let (m, n, k) = (100usize, 72usize, 96usize);
    let (a, b) = (values(m * k, 5), values(n * k, 6));
    everywhere("tiles.cu", |gpu, checks, name| {
        let (left, right) = (gpu.upload(&brain(&a)), gpu.upload(&brain(&b)));
        let c = gpu.memory.allocate((m * n * 4) as u64).unwrap();
        let sizes = [m, n, k].map(|n| (n as i32).to_le_bytes());
        let arguments: [&[u8]; 6] =
            [&left.to_le_bytes(), &right.to_le_bytes(), &c.to_le_bytes(), &sizes[0], &sizes[1], &sizes[2]];
        gpu.run("multiply", [2, 2, 1], 128, &arguments, checks)
            .unwrap_or_else(|fault| panic!("{name}: {fault}"));
        for (i, found) in floats(&gpu.download(c, m * n * 4)).into_iter().enumerate() {
            let (row, column) = (i / n, i % n);
            let exact: f64 = (0..k).map(|l| f64::from(a[row * k + l]) * f64::from(b[column * k + l])).sum();
            assert!((f64::from(found) - exact).abs() < 1e-4, "{name}: {row}, {column}: {found}, not {exact}");
        }
    });
}

/// Replaces one line of a source, and asserts that the changed kernel ends with a fault in each of three orders.
fn mutant(source: &str, from: &str, to: &str, run: impl Fn(&Gpu, &Checks) -> Result<(), Box<Fault>>) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/sources").join(source);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains(from), "{from}");
    let folder = std::env::temp_dir().join(format!(
        "emulated-gpu-{}-{:x}",
        std::process::id(),
        to.len() * 997 + from.len()
    ));
    std::fs::create_dir_all(&folder).unwrap();
    let changed = folder.join(source);
    std::fs::write(&changed, text.replacen(from, to, 1)).unwrap();
    let ptx = compile(changed.to_str().unwrap(), "compute_80");
    std::fs::remove_dir_all(&folder).unwrap();
    let Some(ptx) = ptx else { return };
    for seed in [1, 2, 40] {
        let fault = run(&Gpu::new(&ptx, true), &Checks::all(seed)).unwrap_err();
        let line = fault.source.as_ref().map(|s| (s.file.ends_with(source), s.line > 0));
        assert_eq!(line, Some((true, true)), "{fault}");
    }
}

#[test]
fn mutants_of_the_sources_are_caught() {
    let multiply = |gpu: &Gpu, checks: &Checks| {
        let (m, n, k) = (100usize, 72usize, 96usize);
        let (left, right) = (gpu.upload(&brain(&values(m * k, 5))), gpu.upload(&brain(&values(n * k, 6))));
        let c = gpu.memory.allocate((m * n * 4) as u64).unwrap();
        let sizes = [m, n, k].map(|n| (n as i32).to_le_bytes());
        gpu.run(
            "multiply",
            [2, 2, 1],
            128,
            &[&left.to_le_bytes(), &right.to_le_bytes(), &c.to_le_bytes(), &sizes[0], &sizes[1], &sizes[2]],
            checks,
        )
    };
    let normalise = |gpu: &Gpu, checks: &Checks| {
        let n = 1000usize;
        let (x, w) = (gpu.upload(&brain(&values(5 * n, 3))), gpu.upload(&brain(&values(n, 4))));
        let y = gpu.memory.allocate((5 * n * 2) as u64).unwrap();
        gpu.run(
            "normalise",
            [5, 1, 1],
            192,
            &[
                &x.to_le_bytes(),
                &w.to_le_bytes(),
                &y.to_le_bytes(),
                &(n as i32).to_le_bytes(),
                &1e-6f32.to_le_bytes(),
            ],
            checks,
        )
    };
    mutant("tiles.cu", "__syncthreads();  // Before", "// Before", multiply);
    mutant("tiles.cu", "cp.async.wait_group 1;", "cp.async.wait_group 2;", multiply);
    mutant("tiles.cu", "if (row < m && column < n)", "if (row < m)", multiply);
    mutant(
        "rows.cu",
        "parts[threadIdx.x / 32] = sum;\n  __syncthreads();",
        "parts[threadIdx.x / 32] = sum;",
        normalise,
    );
    mutant(
        "rows.cu",
        "sum = threadIdx.x < blockDim.x / 32 ? parts[threadIdx.x] : 0;",
        "sum = parts[threadIdx.x];",
        normalise,
    );
    mutant("rows.cu", "for (int i = threadIdx.x; i < n;", "for (int i = threadIdx.x; i <= n;", normalise);
    mutant(
        "rows.cu",
        "__shfl_xor_sync(~0u, sum, step);\n  if",
        "__shfl_xor_sync(0x7fffffffu, sum, step);\n  if",
        normalise,
    );
}
