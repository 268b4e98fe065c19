//! Instruction paths, and the choice between them at run time.

use std::fmt;

use crate::DeviceError;
#[cfg(path = "avx2")]
use crate::cpu::simd::Avx2;
#[cfg(path = "avx512")]
use crate::cpu::simd::Avx512;
use crate::cpu::simd::Op;
#[cfg(path = "portable")]
use crate::cpu::simd::Portable;
#[cfg(path = "dots")]
use crate::cpu::simd::{Avx512Bf16, Avx512Vnni};

/// An instruction path. All paths run the same code over sixteen lanes. The documentation of a path notes its
/// differences in rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain code. If the target has no fused instruction, products and sums are rounded separately, so f32 results
    /// differ from the other paths in the last bits.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
    /// AVX-512 with dot products of bytes.
    Avx512Vnni,
    /// AVX-512 with dot products of bytes and of bfloat16. The dot products of bfloat16 flush denormals.
    Avx512Bf16,
}

impl Isa {
    /// All paths in ascending order of preference.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16];

    /// The best path that this machine supports.
    pub fn detect() -> Self {
        Self::supported().last().unwrap_or(Self::Portable)
    }

    /// All paths that this machine supports, in ascending order of preference.
    pub fn supported() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.available())
    }

    /// True if this build has the path: see `build.rs`.
    fn compiled(self) -> bool {
        match self {
            Self::Portable => cfg!(path = "portable"),
            Self::Avx2 => cfg!(path = "avx2"),
            Self::Avx512 => cfg!(path = "avx512"),
            Self::Avx512Vnni | Self::Avx512Bf16 => cfg!(path = "dots"),
        }
    }

    /// True if this build has the path, and this machine all of its instructions.
    pub fn available(self) -> bool {
        self.compiled() && self.supported_here()
    }

    fn supported_here(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            let vnni = avx512 && is_x86_feature_detected!("avx512vnni");
            match self {
                Self::Portable => true,
                Self::Avx2 => avx2,
                Self::Avx512 => avx512,
                Self::Avx512Vnni => vnni,
                Self::Avx512Bf16 => vnni && is_x86_feature_detected!("avx512bf16"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Avx512Bf16 => "avx512-bf16",
        })
    }
}

/// An instruction path that this machine supports.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Path(Isa);

impl Path {
    pub(in crate::cpu) fn new(isa: Isa) -> Result<Self, DeviceError> {
        if isa.available() {
            Ok(Self(isa))
        } else {
            Err(DeviceError::Unsupported(format!("this machine has no {isa} instructions")))
        }
    }

    pub(in crate::cpu) fn isa(self) -> Isa {
        self.0
    }

    /// True if the path has a dot-product instruction for bfloat16 pairs.
    pub(in crate::cpu) fn dots_bf16(self) -> bool {
        self.0 == Isa::Avx512Bf16
    }

    /// Runs `op` as compiled for this path. The paths with AVX-512 share one compilation here; only [`Self::run_dots`]
    /// and [`Self::run_int8`] compile for the dot-product instructions.
    #[inline]
    pub(in crate::cpu) fn run<O: Op>(self, op: O) -> O::Output {
        match self.0 {
            #[cfg(path = "avx2")]
            // SAFETY: `new` has checked that the machine has the instructions.
            Isa::Avx2 => unsafe { Avx2::run(op) },
            #[cfg(path = "avx512")]
            // SAFETY: `new` has checked that the machine has the instructions.
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { Avx512::run(op) },
            #[cfg(path = "portable")]
            _ => Portable::run(op),
            // `new` admits no such path. To the compiler, this may return, so that it keeps the code behind a call,
            // which `tests/disassembly` reads.
            #[cfg(not(path = "portable"))]
            _ => std::hint::black_box(None).expect("a path that this build has"),
        }
    }

    /// Runs `op`, compiled with the path's dot products of integers (AVX512_VNNI) if the path has them.
    #[inline]
    pub(in crate::cpu) fn run_int8<O: Op>(self, op: O) -> O::Output {
        match self.0 {
            #[cfg(path = "dots")]
            // SAFETY: `new` has checked that the machine has the instructions.
            Isa::Avx512Vnni | Isa::Avx512Bf16 => unsafe { Avx512Vnni::run(op) },
            _ => self.run(op),
        }
    }

    /// Runs `op`, compiled with the path's dot products of bfloat16. Panics on a path without them, except in tests.
    #[inline]
    pub(in crate::cpu) fn run_dots<O: Op>(self, op: O) -> O::Output {
        match self.0 {
            #[cfg(path = "dots")]
            // SAFETY: `new` has checked that the machine has the instructions.
            Isa::Avx512Bf16 => unsafe { Avx512Bf16::run(op) },
            // Tests call this function on other paths, to check the code around the dot-product instruction without the
            // instruction.
            _ if cfg!(test) => self.run(op),
            _ => unreachable!("bfloat16 pairs on {}", self.0),
        }
    }
}

// These helpers are shared with the integration tests.
#[cfg(test)]
#[path = "../../../tests/support/paths.rs"]
mod paths;
#[cfg(test)]
pub(in crate::cpu) use paths::testable;
