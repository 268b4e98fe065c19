//! What the machine can do at most, to be measured in the same minute as what is compared with it: how fast all threads
//! together read memory, how many operations a second each instruction path gives, and how many instructions a core issues,
//! which drops where somebody else has a part of the core.

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
/// A huge page of x86-64; elsewhere the advice covers a little less.
const HUGE_PAGE: usize = 2 << 20;

/// The limits of so many threads, medians of the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Limits {
    threads: usize,
    /// In units of 10^9 bytes per second.
    pub memory_read_gb_per_s: f64,
    /// Instructions that do nothing, in 10^9 per second. A neighbour on the same core, a hyperthread or another guest, takes
    /// its share of them: a round with fewer is one with a neighbour.
    pub nops_giga_per_s: f64,
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
    /// Multiplications and additions, each counted, in 10^9 per second.
    pub giga_per_s: f64,
}

/// How long a limit is measured.
#[derive(Clone, Copy)]
pub struct Effort {
    /// Rounds of each limit.
    pub rounds: usize,
    /// Length of a round.
    pub round: Duration,
}

impl Effort {
    /// A second for each limit.
    pub const THOROUGH: Self = Self { rounds: 5, round: Duration::from_millis(200) };
    /// Between the rounds of a benchmark.
    pub const BRIEF: Self = Self { rounds: 3, round: Duration::from_millis(60) };
}

/// Memory to read from, and threads to read and compute with.
pub struct Probe {
    memories: Vec<Vec<u64>>,
}

impl Probe {
    /// For so many threads.
    pub fn new(threads: usize) -> Self {
        Self { memories: (0..threads).map(|_| memory()).collect() }
    }

    /// Bytes read from memory, in 10^9 per second, round by round.
    pub fn memory_rounds(&self, effort: Effort) -> Vec<f64> {
        on_each_core(self.memories.len(), effort, |thread| {
            let memory = &self.memories[thread];
            (READ_BYTES as f64, move || read(memory))
        })
    }

    /// Operations of a path's instructions, in 10^9 per second, round by round. `None` where the machine does not have them.
    pub fn arithmetic_rounds(&self, path: &str, instructions: &str, effort: Effort) -> Option<Vec<f64>> {
        let loops = loops();
        let one = loops.iter().find(|one| one.path == path && one.instructions.starts_with(instructions))?;
        one.available.then(|| one.rounds(self.memories.len(), effort))
    }

    /// All limits, medians of the rounds.
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
    /// Measures for some seconds, on as many cores.
    pub fn of(threads: usize) -> Self {
        Probe::new(threads).limits(Effort::THOROUGH)
    }
}

/// 10^9 units of work per second of all threads together, round by round. `work` says, for a thread, how many units one call
/// does, and the call.
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

/// Keeps the calling thread on one of the cores that this process may use. Where that cannot be, it floats.
fn pin(index: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    let Some(core) = cores.get(index % cores.len().max(1)) else { return };
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

/// Streams that a thread reads at once, as products do, and how many words ahead of its reads it asks for memory.
const STREAMS: usize = 4;
const AHEAD: usize = 2048 / 8;
/// Words of a cache line.
const LINE: usize = 8;

/// Reads all of it, in several streams as a product does.
fn read(memory: &[u64]) {
    let len = memory.len() / STREAMS;
    let streams: [&[u64]; STREAMS] = std::array::from_fn(|index| &memory[index * len..(index + 1) * len]);
    let mut sums = [[0u64; LINE]; STREAMS];
    for at in (0..len).step_by(LINE) {
        for (stream, sums) in streams.iter().zip(&mut sums) {
            ask_for(stream.as_ptr().wrapping_add(at + AHEAD));
            sums.iter_mut().zip(&stream[at..at + LINE]).for_each(|(sum, word)| *sum |= word);
        }
    }
    black_box(sums);
}

/// Any address will do.
fn ask_for(word: *const u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: only a hint.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(word.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

/// A loop of one kind of multiply-adds.
struct Loop {
    path: &'static str,
    instructions: &'static str,
    available: bool,
    /// Operations of one turn.
    operations: f64,
    /// [`TURNS`] turns.
    run: fn(),
}

impl Loop {
    fn rounds(&self, threads: usize, effort: Effort) -> Vec<f64> {
        on_each_core(threads, effort, |_| (f64::from(TURNS) * self.operations, self.run))
    }
}

/// Turns of a loop in one call: some microseconds.
const TURNS: u32 = 10_000;

/// Multiplies and adds as the compiler arranges them.
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

/// Instructions that do nothing, in 10^9 per second, round by round.
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
    /// A loop of so many sums, each depending only on itself, with these instructions once for each; `\\sum` is a sum's
    /// register. Registers that are no sums are zero, or finite numbers of any kind.
    macro_rules! turns {
        ($sums:literal: $($instruction:literal),+) => {
            || {
                static ONE: u32 = 0x3f80_3f80;
                // SAFETY: only `ONE` is read, and all registers that a callee may change are declared as changed. It
                // runs only where the machine has the instructions.
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
    /// Twelve hide every latency of one multiply-add per cycle, and twenty-four of two.
    macro_rules! twelve {
        ($($instruction:literal),+) => { turns!("0,1,2,3,4,5,6,7,8,9,10,11": $($instruction),+) };
    }
    macro_rules! twenty_four {
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
        one("avx2", avx2, "vfmadd231ps (f32)", 12.0 * 16.0, twelve!("vfmadd231ps ymm\\sum, ymm14, ymm15")),
        one(
            "avx2",
            avx2,
            "vpmaddwd + vpaddd (i16)",
            12.0 * 32.0,
            twelve!("vpmaddwd ymm12, ymm14, ymm15", "vpaddd ymm\\sum, ymm\\sum, ymm12"),
        ),
        one(
            "avx2",
            avx2,
            "vpmaddubsw + vpmaddwd + vpaddd (i8)",
            12.0 * 64.0,
            twelve!(
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
            twenty_four!("vfmadd231ps zmm\\sum, zmm14, zmm15"),
        ),
        one(
            "avx512",
            avx512,
            "vpmaddwd + vpaddd (i16)",
            24.0 * 64.0,
            twenty_four!("vpmaddwd zmm12, zmm14, zmm15", "vpaddd zmm\\sum, zmm\\sum, zmm12"),
        ),
        one(
            "avx512",
            avx512,
            "vpmaddubsw + vpmaddwd + vpaddd (i8)",
            24.0 * 128.0,
            twenty_four!(
                "vpmaddubsw zmm12, zmm14, zmm15",
                "vpmaddwd zmm12, zmm12, zmm13",
                "vpaddd zmm\\sum, zmm\\sum, zmm12"
            ),
        ),
        one(
            "avx512-vnni",
            vnni,
            "vpdpwssd (i16)",
            24.0 * 64.0,
            twenty_four!("vpdpwssd zmm\\sum, zmm14, zmm15"),
        ),
        one(
            "avx512-vnni",
            vnni,
            "vpdpbusd (i8)",
            24.0 * 128.0,
            twenty_four!("vpdpbusd zmm\\sum, zmm14, zmm15"),
        ),
        one(
            "avx512-bf16",
            bf16,
            "vdpbf16ps (bf16)",
            24.0 * 64.0,
            twenty_four!("vdpbf16ps zmm\\sum, zmm14, zmm15"),
        ),
        one(
            "avx512-bf16",
            bf16,
            "broadcast + two vdpbf16ps (bf16)",
            20.0 * 64.0,
            // Sums 0 to 9, and 20 to 29.
            turns!(
                "0,1,2,3,4,5,6,7,8,9":
                "vbroadcastss zmm12, dword ptr [rsi]",
                "vdpbf16ps zmm\\sum, zmm14, zmm12",
                "vdpbf16ps zmm2\\sum, zmm15, zmm12"
            ),
        ),
    ]
}
