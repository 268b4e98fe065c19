//! Limits of the machine: memory bandwidth of all threads, operations per second of each instruction path, and `nop`
//! instructions per second. The rate of `nop` drops if something else runs on the same core. Measure limits in the same
//! minute as the figures that are compared with them, because clock rates and the load by other guests change.

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

use crate::statistics::median;

/// Memory that each thread reads, in bytes: far more than any cache holds.
const READ_BYTES: usize = 256 << 20;
/// Size of a huge page on x86-64. On other machines, `madvise` covers slightly less memory.
const HUGE_PAGE: usize = 2 << 20;

/// Limits of `threads` threads, as medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Limits {
    threads: usize,
    /// Memory bandwidth of all threads, in 10^9 bytes per second.
    pub memory_read_gb_per_s: f64,
    /// `nop` instructions, in 10^9 per second. Another hyperthread or virtual machine on the same core takes a share of
    /// them, so a low figure shows that the core is shared.
    pub nops_giga_per_s: f64,
    /// One entry per kind of multiply-add that this machine has.
    pub arithmetic: Vec<Arithmetic>,
}

/// Throughput of one kind of multiply-add.
#[derive(Clone, Debug, Serialize)]
pub struct Arithmetic {
    /// Name of the kernels' instruction path.
    pub path: &'static str,
    /// Instructions of one multiply-add.
    pub instructions: &'static str,
    /// Operations in 10^9 per second. A multiply-add counts as two.
    pub giga_per_s: f64,
}

/// Number and length of the rounds in which a limit is measured.
#[derive(Clone, Copy)]
pub struct Effort {
    /// Number of rounds per limit.
    pub rounds: usize,
    /// Length of a round.
    pub round: Duration,
}

impl Effort {
    /// Measures for one second per limit.
    pub const THOROUGH: Self = Self { rounds: 5, round: Duration::from_millis(200) };
    /// A short measurement, for use between the rounds of a bench.
    pub const BRIEF: Self = Self { rounds: 3, round: Duration::from_millis(60) };
}

/// Measures limits. Holds the memory that the measuring threads read.
pub struct Probe {
    memories: Vec<Vec<u64>>,
}

impl Probe {
    /// Allocates memory for `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self { memories: (0..threads).map(|_| memory()).collect() }
    }

    /// Returns the memory bandwidth of each round, in 10^9 bytes per second.
    pub fn memory_rounds(&self, effort: Effort) -> Vec<f64> {
        on_each_core(self.memories.len(), effort, |thread| {
            let memory = &self.memories[thread];
            (READ_BYTES as f64, move || read(memory))
        })
    }

    /// Returns the throughput of a path's instructions in each round, in 10^9 operations per second, or `None` if the
    /// machine does not have these instructions.
    pub fn arithmetic_rounds(&self, path: &str, instructions: &str, effort: Effort) -> Option<Vec<f64>> {
        let loops = loops();
        let one = loops.iter().find(|one| one.path == path && one.instructions.starts_with(instructions))?;
        one.available.then(|| one.rounds(self.memories.len(), effort))
    }

    /// Measures all limits.
    pub fn limits(&self, effort: Effort) -> Limits {
        let threads = self.memories.len();
        let available = loops().into_iter().filter(|one| one.available);
        let arithmetic = available.map(|one| Arithmetic {
            path: one.path,
            instructions: one.instructions,
            giga_per_s: median(one.rounds(threads, effort)),
        });
        Limits {
            threads,
            memory_read_gb_per_s: median(self.memory_rounds(effort)),
            nops_giga_per_s: median(nop_rounds(threads, effort)),
            arithmetic: arithmetic.collect(),
        }
    }
}

impl Limits {
    /// Measures all limits on `threads` cores. Takes some seconds.
    pub fn of(threads: usize) -> Self {
        Probe::new(threads).limits(Effort::THOROUGH)
    }
}

/// Calls the function of each thread repeatedly, in timed rounds. Returns the summed throughput of all threads in each
/// round, in 10^9 units per second. `work` maps a thread's index to that function, and to the number of units per call.
fn on_each_core<F: FnMut()>(
    threads: usize,
    effort: Effort,
    work: impl Fn(usize) -> (f64, F) + Sync,
) -> Vec<f64> {
    let barrier = Barrier::new(threads);
    let thread = |index: usize| {
        pin(index);
        let (units, mut call) = work(index);
        let mut round = || {
            barrier.wait();
            let (began, mut done) = (Instant::now(), 0.0);
            while began.elapsed() < effort.round {
                call();
                done += units;
            }
            done / began.elapsed().as_secs_f64() / 1e9
        };
        (0..effort.rounds).map(|_| round()).collect::<Vec<f64>>()
    };
    let of_threads: Vec<Vec<f64>> = thread::scope(|scope| {
        let thread = &thread;
        let running: Vec<_> = (0..threads).map(|index| scope.spawn(move || thread(index))).collect();
        running.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
    });
    let round = |round: usize| of_threads.iter().filter_map(|rates| rates.get(round)).sum::<f64>();
    (0..effort.rounds).map(round).collect()
}

/// Pins the calling thread to one of the cores that this process may use. If that fails, the thread stays unpinned.
fn pin(index: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    let Some(core) = cores.get(index % cores.len().max(1)) else { return };
    let mut only = CpuSet::new();
    only.set(*core);
    let _ = sched_setaffinity(None, &only);
}

/// Allocates memory and writes to all of it, on huge pages if the system has any.
fn memory() -> Vec<u64> {
    let mut memory: Vec<u64> = Vec::with_capacity(READ_BYTES / 8);
    let start = memory.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(HUGE_PAGE).min(READ_BYTES);
    // SAFETY: the pages lie inside the vector's own allocation, and the advice changes no byte of them.
    let _ = unsafe { madvise(start.add(skipped).cast(), READ_BYTES - skipped, Advice::LinuxHugepage) };
    memory.resize(READ_BYTES / 8, 1);
    memory
}

/// Number of streams that a thread reads at once: as many as a matrix product reads.
const STREAMS: usize = 4;
/// Distance by which prefetches run ahead of reads, in words of 8 bytes.
const AHEAD: usize = 2048 / 8;
/// Words per cache line.
const LINE: usize = 8;

/// Reads all of `memory`, in [`STREAMS`] streams as a matrix product does.
fn read(memory: &[u64]) {
    let len = memory.len() / STREAMS;
    let streams: [&[u64]; STREAMS] = std::array::from_fn(|index| &memory[index * len..(index + 1) * len]);
    let mut sums = [[0u64; LINE]; STREAMS];
    for at in (0..len).step_by(LINE) {
        for (stream, sums) in streams.iter().zip(&mut sums) {
            prefetch(stream.as_ptr().wrapping_add(at + AHEAD));
            sums.iter_mut().zip(&stream[at..at + LINE]).for_each(|(sum, word)| *sum |= word);
        }
    }
    black_box(sums);
}

/// Prefetches a word. Any address is valid.
fn prefetch(word: *const u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is only a hint, and no address makes it fault.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(word.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

/// A loop that measures one kind of multiply-add. One iteration is a turn.
struct Loop {
    path: &'static str,
    instructions: &'static str,
    available: bool,
    /// Operations per turn.
    operations: f64,
    /// Function that runs [`TURNS`] turns.
    run: fn(),
}

impl Loop {
    fn rounds(&self, threads: usize, effort: Effort) -> Vec<f64> {
        on_each_core(threads, effort, |_| (f64::from(TURNS) * self.operations, self.run))
    }
}

/// Number of turns per call of a loop. A call takes some microseconds.
const TURNS: u32 = 10_000;

/// Multiply-adds in Rust, compiled for the baseline instruction set.
fn plain() {
    let (mut sums, x) = ([0.0f32; PLAIN_SUMS], black_box([1e-3f32; PLAIN_SUMS]));
    for _ in 0..TURNS {
        sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum = *sum * 0.5 + *x);
    }
    black_box(sums);
}
const PLAIN_SUMS: usize = 48;

fn portable() -> Loop {
    Loop {
        path: "portable",
        instructions: "compiled multiply and add (f32)",
        available: true,
        operations: 2.0 * PLAIN_SUMS as f64,
        run: plain,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn loops() -> Vec<Loop> {
    vec![portable()]
}

#[cfg(not(target_arch = "x86_64"))]
fn nop_rounds(_: usize, effort: Effort) -> Vec<f64> {
    vec![0.0; effort.rounds]
}

/// Returns the throughput of `nop` in each round, in 10^9 instructions per second.
#[cfg(target_arch = "x86_64")]
fn nop_rounds(threads: usize, effort: Effort) -> Vec<f64> {
    const NOPS: u32 = 64;
    let call = || {
        // SAFETY: no memory is touched.
        unsafe {
            std::arch::asm!(
                "2:",
                ".rept 62",
                "nop",
                ".endr",
                "sub ecx, 1",
                "jnz 2b",
                inout("ecx") TURNS => _,
                options(nostack, nomem),
            )
        }
    };
    on_each_core(threads, effort, |_| (f64::from(TURNS * NOPS), call))
}

#[cfg(target_arch = "x86_64")]
fn loops() -> Vec<Loop> {
    /// Expands to a closure with a loop, which runs the instructions once per sum in each turn. The instructions write
    /// `\\sum` for the number of a sum's register. Each sum depends only on its own previous value. All other registers
    /// hold zero or finite numbers.
    macro_rules! turns {
        ($sums:literal: $($instruction:literal),+) => {
            || {
                static ONE: u32 = 0x3f80_3f80;
                // SAFETY: the loop reads only `ONE`, declares all registers that a callee may change as changed, and
                // runs only on a machine that has the instructions.
                unsafe {
                    std::arch::asm!(
                        "vzeroall",
                        "2:",
                        concat!(".irp sum,", $sums),
                        $($instruction,)+
                        ".endr",
                        "sub ecx, 1",
                        "jnz 2b",
                        "vzeroupper",
                        inout("ecx") TURNS => _,
                        in("rsi") &raw const ONE,
                        clobber_abi("sysv64"),
                        options(nostack, readonly),
                    )
                }
            }
        };
    }
    /// Expands to a loop with 12 sums. They hide the latency of instructions at one multiply-add per cycle; `sums_24`
    /// has 24, enough for two multiply-adds per cycle.
    macro_rules! sums_12 {
        ($($instruction:literal),+) => { turns!("0,1,2,3,4,5,6,7,8,9,10,11": $($instruction),+) };
    }
    macro_rules! sums_24 {
        ($($instruction:literal),+) => {
            turns!("0,1,2,3,4,5,6,7,8,9,10,11,16,17,18,19,20,21,22,23,24,25,26,27": $($instruction),+)
        };
    }
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2 && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
    let vnni = avx512 && is_x86_feature_detected!("avx512vnni");
    let bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
    let one = |path, available, instructions, operations: f64, run| Loop {
        path,
        instructions,
        available,
        operations,
        run,
    };
    vec![
        portable(),
        one("avx2", avx2, "vfmadd231ps (f32)", 12.0 * 16.0, sums_12!("vfmadd231ps ymm\\sum, ymm14, ymm15")),
        one(
            "avx2",
            avx2,
            "vpmaddwd + vpaddd (i16)",
            12.0 * 32.0,
            sums_12!("vpmaddwd ymm12, ymm14, ymm15", "vpaddd ymm\\sum, ymm\\sum, ymm12"),
        ),
        one(
            "avx2",
            avx2,
            "vpmaddubsw + vpmaddwd + vpaddd (i8)",
            12.0 * 64.0,
            sums_12!(
                "vpmaddubsw ymm12, ymm14, ymm15",
                "vpmaddwd ymm12, ymm12, ymm13",
                "vpaddd ymm\\sum, ymm\\sum, ymm12"
            ),
        ),
        one(
            "avx512",
            avx512,
            "vfmadd231ps (f32)",
            24.0 * 32.0,
            sums_24!("vfmadd231ps zmm\\sum, zmm14, zmm15"),
        ),
        one(
            "avx512",
            avx512,
            "vpmaddwd + vpaddd (i16)",
            24.0 * 64.0,
            sums_24!("vpmaddwd zmm12, zmm14, zmm15", "vpaddd zmm\\sum, zmm\\sum, zmm12"),
        ),
        one(
            "avx512",
            avx512,
            "vpmaddubsw + vpmaddwd + vpaddd (i8)",
            24.0 * 128.0,
            sums_24!(
                "vpmaddubsw zmm12, zmm14, zmm15",
                "vpmaddwd zmm12, zmm12, zmm13",
                "vpaddd zmm\\sum, zmm\\sum, zmm12"
            ),
        ),
        one("avx512-vnni", vnni, "vpdpwssd (i16)", 24.0 * 64.0, sums_24!("vpdpwssd zmm\\sum, zmm14, zmm15")),
        one("avx512-vnni", vnni, "vpdpbusd (i8)", 24.0 * 128.0, sums_24!("vpdpbusd zmm\\sum, zmm14, zmm15")),
        one(
            "avx512-bf16",
            bf16,
            "vdpbf16ps (bf16)",
            24.0 * 64.0,
            sums_24!("vdpbf16ps zmm\\sum, zmm14, zmm15"),
        ),
        one(
            "avx512-bf16",
            bf16,
            "broadcast + two vdpbf16ps (bf16)",
            20.0 * 64.0,
            // The sums are in registers 0 to 9 and, by the prefix `zmm2`, 20 to 29.
            turns!(
                "0,1,2,3,4,5,6,7,8,9":
                "vbroadcastss zmm12, dword ptr [rsi]",
                "vdpbf16ps zmm\\sum, zmm14, zmm12",
                "vdpbf16ps zmm2\\sum, zmm15, zmm12"
            ),
        ),
    ]
}
