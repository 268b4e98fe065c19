//! What the machine can do at most, to be measured in the same minute as what is compared with it: how fast all threads
//! together read memory, and how many operations a second each instruction path gives on values that never leave
//! registers.

use std::{
    hint::black_box,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    mm::{Advice, madvise},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use serde::Serialize;

use crate::results::median;

/// Each thread reads so much, far more than any cache holds.
const READ_BYTES: usize = 256 << 20;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(200);
/// A huge page of x86-64; elsewhere the advice covers a little less.
const HUGE_PAGE: usize = 2 << 20;

/// The limits of so many threads, medians of [`ROUNDS`] rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Limits {
    threads: usize,
    /// In units of 10^9 bytes a second.
    pub memory_read_gb_per_s: f64,
    /// Of the instructions that this machine has.
    pub arithmetic: Vec<Arithmetic>,
}

/// What one way to multiply and add reaches.
#[derive(Clone, Debug, Serialize)]
pub struct Arithmetic {
    /// The kernels' instruction path that has it.
    pub path: &'static str,
    /// The instructions of one multiply-add.
    pub instructions: &'static str,
    /// Multiplications and additions, each counted, in 10^9 a second.
    pub giga_per_s: f64,
}

impl Limits {
    /// Measures for a few seconds, on as many cores.
    pub fn of(threads: usize) -> Self {
        let memories: Vec<Vec<u64>> = (0..threads).map(|_| memory()).collect();
        let read = on_each_core(threads, |thread| {
            let memory = &memories[thread];
            (READ_BYTES as f64, move || read(memory))
        });
        let arithmetic = instructions().into_iter().filter(|way| way.available).map(|way| Arithmetic {
            path: way.path,
            instructions: way.instructions,
            giga_per_s: on_each_core(threads, |_| (f64::from(LOOPS) * way.operations, way.run)),
        });
        Self { threads, memory_read_gb_per_s: read, arithmetic: arithmetic.collect() }
    }
}

/// 10^9 units of work a second of all threads together. `work` says, for a thread, how many units one call does, and the
/// call.
fn on_each_core<F: FnMut()>(threads: usize, work: impl Fn(usize) -> (f64, F) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let thread = |place: usize| {
        pin(place);
        let (units, mut call) = work(place);
        let mut round = || {
            barrier.wait();
            let (began, mut done) = (Instant::now(), 0.0);
            while began.elapsed() < ROUND {
                call();
                done += units;
            }
            done / began.elapsed().as_secs_f64() / 1e9
        };
        (0..ROUNDS).map(|_| round()).collect::<Vec<f64>>()
    };
    let of_threads: Vec<Vec<f64>> = thread::scope(|scope| {
        let thread = &thread;
        let running: Vec<_> = (0..threads).map(|place| scope.spawn(move || thread(place))).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
    });
    let round = |round: usize| of_threads.iter().filter_map(|rates| rates.get(round)).sum::<f64>();
    median((0..ROUNDS).map(round))
}

/// Keeps the calling thread on one of the cores that this process may use. Where that cannot be, it floats.
fn pin(place: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    let Some(core) = cores.get(place % cores.len().max(1)) else { return };
    let mut only = CpuSet::new();
    only.set(*core);
    let _ = sched_setaffinity(None, &only);
}

/// Memory that is committed, on huge pages where there are any.
fn memory() -> Vec<u64> {
    let mut memory: Vec<u64> = Vec::with_capacity(READ_BYTES / 8);
    let start = memory.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(HUGE_PAGE).min(READ_BYTES);
    // SAFETY: the pages lie inside the vector's own allocation, and what is advised changes no byte of them.
    let _ = unsafe { madvise(start.add(skipped).cast(), READ_BYTES - skipped, Advice::LinuxHugepage) };
    memory.resize(READ_BYTES / 8, 1);
    memory
}

fn read(memory: &[u64]) {
    // As many sums as keep the loads independent of each other.
    let mut sums = [0u64; 32];
    for line in memory.chunks_exact(sums.len()) {
        for (sum, value) in sums.iter_mut().zip(line) {
            *sum |= value;
        }
    }
    black_box(sums);
}

/// A way to multiply and add.
struct Way {
    path: &'static str,
    instructions: &'static str,
    available: bool,
    /// Of one turn of its loop.
    operations: f64,
    /// [`LOOPS`] turns.
    run: fn(),
}

/// Turns of a loop in one call: some microseconds.
const LOOPS: u32 = 10_000;
/// Sums that a turn adds to, each depending only on itself: more than any machine has multiplies in flight.
#[cfg(target_arch = "x86_64")]
const SUMS: f64 = 12.0;

#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> Vec<Way> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
fn instructions() -> Vec<Way> {
    /// A loop whose turn has these instructions once for each sum; `\\sum` is its register's number, registers 12 to 15
    /// are free, and all are zero at first.
    macro_rules! turns {
        ($($instruction:literal),+) => {
            || {
                // SAFETY: no memory is touched, and all registers that a callee may change are declared as changed. It
                // runs only where the machine has the instructions.
                unsafe {
                    std::arch::asm!(
                        "vzeroall",
                        "2:",
                        ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11",
                        $($instruction,)+
                        ".endr",
                        "sub ecx, 1",
                        "jnz 2b",
                        "vzeroupper",
                        inout("ecx") LOOPS => _,
                        clobber_abi("sysv64"),
                        options(nostack),
                    )
                }
            }
        };
    }
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    let way = |path, available, instructions, operations: f64, run| Way {
        path,
        instructions,
        available,
        operations: SUMS * operations,
        run,
    };
    vec![
        way("avx2", avx2, "vfmadd231ps (f32)", 16.0, turns!("vfmadd231ps ymm\\sum, ymm14, ymm15")),
        way(
            "avx2",
            avx2,
            "vpmaddwd + vpaddd (i16)",
            32.0,
            turns!("vpmaddwd ymm12, ymm14, ymm15", "vpaddd ymm\\sum, ymm\\sum, ymm12"),
        ),
        way(
            "avx2",
            avx2,
            "vpmaddubsw + vpmaddwd + vpaddd (i8)",
            64.0,
            turns!(
                "vpmaddubsw ymm12, ymm14, ymm15",
                "vpmaddwd ymm12, ymm12, ymm13",
                "vpaddd ymm\\sum, ymm\\sum, ymm12"
            ),
        ),
        way("avx512", avx512, "vfmadd231ps (f32)", 32.0, turns!("vfmadd231ps zmm\\sum, zmm14, zmm15")),
        way(
            "avx512",
            avx512,
            "vpmaddubsw + vpmaddwd + vpaddd (i8)",
            128.0,
            turns!(
                "vpmaddubsw zmm12, zmm14, zmm15",
                "vpmaddwd zmm12, zmm12, zmm13",
                "vpaddd zmm\\sum, zmm\\sum, zmm12"
            ),
        ),
        way(
            "avx512-bf16",
            avx512 && is_x86_feature_detected!("avx512bf16"),
            "vdpbf16ps (bf16)",
            64.0,
            turns!("vdpbf16ps zmm\\sum, zmm14, zmm15"),
        ),
        way(
            "avx512-vnni",
            avx512 && is_x86_feature_detected!("avx512vnni"),
            "vpdpbusd (i8)",
            128.0,
            turns!("vpdpbusd zmm\\sum, zmm14, zmm15"),
        ),
    ]
}
