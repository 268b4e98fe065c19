//! What the machine can do at most: multiply-adds and reads from memory, with so many threads.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tutti_kernels::cpu::Isa;
use tutti_measure::limits::{Effort, Probe as Machine};

/// Limits of all threads together, per second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Floating-point operations of attention, a fused multiply-add being two: of pairs of bfloat16 where the path has them,
    /// of f32 elsewhere.
    pub flops: f64,
    /// Operations of products: of pairs of bfloat16 where the path has them, of integers elsewhere; of bytes where weights
    /// are quantised to them.
    pub products: f64,
    /// Bytes read from memory.
    pub bytes: f64,
}

impl Limits {
    /// The larger of each: other work on the machine only ever makes a limit look lower than it is.
    pub fn best(self, other: Self) -> Self {
        Self {
            flops: self.flops.max(other.flops),
            products: self.products.max(other.products),
            bytes: self.bytes.max(other.bytes),
        }
    }
}

/// What time is taken by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Time that passes.
    Wall,
    /// Time that the calling thread had a core.
    Own,
}

impl Clock {
    /// Since some moment.
    pub fn now(self) -> Duration {
        let id = match self {
            Self::Wall => ClockId::Monotonic,
            Self::Own => ClockId::ThreadCPUTime,
        };
        let now = clock_gettime(id);
        Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
    }
}

/// Measures the limits that hold for a path and its weights.
pub struct Probe {
    machine: Machine,
    isa: Isa,
    int8: bool,
}

impl Probe {
    pub fn new(threads: usize, isa: Isa, int8: bool) -> Self {
        Self { machine: Machine::new(threads), isa, int8 }
    }

    /// The best of a few tries.
    pub fn measure(&self) -> Limits {
        let best = |rounds: Vec<f64>| 1e9 * rounds.into_iter().fold(0.0, f64::max);
        let rate = |(path, instructions)| {
            self.machine.arithmetic_rounds(path, instructions, Effort::BRIEF).map(best).unwrap_or_default()
        };
        Limits {
            flops: rate(attention(self.isa)),
            products: rate(if self.int8 { bytes(self.isa) } else { pairs(self.isa) }),
            bytes: best(self.machine.memory_rounds(Effort::BRIEF)),
        }
    }
}

/// The instructions of attention over pages of bfloat16.
fn attention(isa: Isa) -> (&'static str, &'static str) {
    match isa {
        Isa::Avx512Bf16 => ("avx512-bf16", "vdpbf16ps"),
        Isa::Avx512 | Isa::Avx512Vnni => ("avx512", "vfmadd231ps"),
        Isa::Avx2 => ("avx2", "vfmadd231ps"),
        Isa::Portable => ("portable", "compiled"),
    }
}

/// The instructions of products with weights of bfloat16.
fn pairs(isa: Isa) -> (&'static str, &'static str) {
    match isa {
        Isa::Avx512Bf16 => ("avx512-bf16", "vdpbf16ps"),
        Isa::Avx512Vnni => ("avx512-vnni", "vpdpwssd"),
        Isa::Avx512 => ("avx512", "vpmaddwd"),
        Isa::Avx2 => ("avx2", "vpmaddwd"),
        Isa::Portable => ("portable", "compiled"),
    }
}

/// The instructions of products with weights of eight bits.
fn bytes(isa: Isa) -> (&'static str, &'static str) {
    match isa {
        Isa::Avx512Bf16 | Isa::Avx512Vnni => ("avx512-vnni", "vpdpbusd"),
        // Bytes are widened to sixteen bits.
        _ => pairs(isa),
    }
}
