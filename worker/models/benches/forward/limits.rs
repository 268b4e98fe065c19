//! Measures the limits of the machine: multiply-adds and bytes read from memory per second, with a number of threads.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tutti_kernels::cpu::Isa;
use tutti_measure::limits::{Effort, Probe as Machine};

/// Limits per second, of all threads together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Floating-point operations of attention per second; a fused multiply-add counts as two. The operands are pairs of
    /// bfloat16 if the instruction path multiplies these, else f32.
    pub flops: f64,
    /// Operations of matrix products with weights, per second. The operands are bytes if weights are quantised.
    /// Otherwise they are pairs of bfloat16 if the instruction path multiplies these, else 16-bit integers.
    pub products: f64,
    /// Bytes read from memory per second.
    pub bytes: f64,
}

impl Limits {
    /// Returns the larger value of each limit, since other work on the machine can only lower a measured limit.
    pub fn best(self, other: Self) -> Self {
        Self {
            flops: self.flops.max(other.flops),
            products: self.products.max(other.products),
            bytes: self.bytes.max(other.bytes),
        }
    }
}

/// The clock that the benchmark reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// Wall-clock time.
    Wall,
    /// CPU time of the calling thread.
    Own,
}

impl Clock {
    /// Returns the time since a fixed start.
    pub fn now(self) -> Duration {
        let id = match self {
            Self::Wall => ClockId::Monotonic,
            Self::Own => ClockId::ThreadCPUTime,
        };
        let now = clock_gettime(id);
        Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
    }
}

/// Measures the limits of an instruction path with one type of weights.
pub struct Probe {
    machine: Machine,
    isa: Isa,
    int8: bool,
}

impl Probe {
    pub fn new(threads: usize, isa: Isa, int8: bool) -> Self {
        Self { machine: Machine::new(threads), isa, int8 }
    }

    /// Measures each limit a few times and returns the best.
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

/// Returns the path and the instruction that attention over pages of bfloat16 uses.
fn attention(isa: Isa) -> (&'static str, &'static str) {
    match isa {
        Isa::Avx512Bf16 => ("avx512-bf16", "vdpbf16ps"),
        Isa::Avx512 | Isa::Avx512Vnni => ("avx512", "vfmadd231ps"),
        Isa::Avx2 => ("avx2", "vfmadd231ps"),
        Isa::Portable => ("portable", "compiled"),
    }
}

/// Returns the path and the instruction that matrix products with bfloat16 weights use.
fn pairs(isa: Isa) -> (&'static str, &'static str) {
    match isa {
        Isa::Avx512Bf16 => ("avx512-bf16", "vdpbf16ps"),
        Isa::Avx512Vnni => ("avx512-vnni", "vpdpwssd"),
        Isa::Avx512 => ("avx512", "vpmaddwd"),
        Isa::Avx2 => ("avx2", "vpmaddwd"),
        Isa::Portable => ("portable", "compiled"),
    }
}

/// Returns the path and the instruction that matrix products with int8 weights use.
fn bytes(isa: Isa) -> (&'static str, &'static str) {
    match isa {
        Isa::Avx512Bf16 | Isa::Avx512Vnni => ("avx512-vnni", "vpdpbusd"),
        // Other paths widen bytes to 16 bits and multiply those.
        _ => pairs(isa),
    }
}
