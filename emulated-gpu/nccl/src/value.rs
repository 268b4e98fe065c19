//! Element types and their reductions.

use half::{bf16, f16};

/// Element type (`ncclDataType_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
}

impl Kind {
    /// Returns the type with an `ncclDataType_t` code; none if the library does not support the type.
    pub fn of(code: i32) -> Option<Kind> {
        use Kind::*;
        [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16].get(usize::try_from(code).ok()?).copied()
    }

    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Kind::I8 | Kind::U8 => 1,
            Kind::F16 | Kind::Bf16 => 2,
            Kind::I32 | Kind::U32 | Kind::F32 => 4,
            Kind::I64 | Kind::U64 | Kind::F64 => 8,
        }
    }
}

/// Reduction (`ncclRedOp_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Reduction {
    /// Returns the reduction with an `ncclRedOp_t` code; none if the library does not support it.
    pub fn of(code: i32) -> Option<Reduction> {
        use Reduction::*;
        [Sum, Product, Max, Min, Average].get(usize::try_from(code).ok()?).copied()
    }
}

/// An element type that reductions support.
trait Element: Copy {
    const BYTES: usize;
    fn load(bytes: &[u8]) -> Self;
    fn store(self, bytes: &mut [u8]);
    fn combine(self, other: Self, reduction: Reduction) -> Self;
    fn divide(self, count: usize) -> Self;
}

macro_rules! element {
    ($kind:ty, $wide:ty, $load:expr, $narrow:expr, $add:ident, $multiply:ident) => {
        impl Element for $kind {
            const BYTES: usize = size_of::<$kind>();
            fn load(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<$kind>()];
                own.copy_from_slice(bytes);
                <$kind>::from_ne_bytes(own)
            }
            fn store(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }
            fn combine(self, other: Self, reduction: Reduction) -> Self {
                let (a, b): ($wide, $wide) = ($load(self), $load(other));
                $narrow(match reduction {
                    Reduction::Sum | Reduction::Average => a.$add(b),
                    Reduction::Product => a.$multiply(b),
                    Reduction::Max => a.max(b),
                    Reduction::Min => a.min(b),
                })
            }
            fn divide(self, count: usize) -> Self {
                let value: $wide = $load(self);
                $narrow(value / count as $wide)
            }
        }
    };
}

macro_rules! integers {
    ($($kind:ty)*) => {$(element!($kind, $kind, std::convert::identity, std::convert::identity, wrapping_add, wrapping_mul);)*};
}
use std::ops::{Add, Mul};
integers!(i8 u8 i32 u32 i64 u64);
element!(f32, f32, std::convert::identity, std::convert::identity, add, mul);
element!(f64, f64, std::convert::identity, std::convert::identity, add, mul);
element!(f16, f32, f16::to_f32, f16::from_f32, add, mul);
element!(bf16, f32, bf16::to_f32, bf16::from_f32, add, mul);

/// Reduces the contributions of all ranks, in the order of ranks. All contributions have the same length.
pub fn reduce(kind: Kind, reduction: Reduction, contributions: &[Vec<u8>]) -> Vec<u8> {
    match kind {
        Kind::I8 => reduce_as::<i8>(reduction, contributions),
        Kind::U8 => reduce_as::<u8>(reduction, contributions),
        Kind::I32 => reduce_as::<i32>(reduction, contributions),
        Kind::U32 => reduce_as::<u32>(reduction, contributions),
        Kind::I64 => reduce_as::<i64>(reduction, contributions),
        Kind::U64 => reduce_as::<u64>(reduction, contributions),
        Kind::F16 => reduce_as::<f16>(reduction, contributions),
        Kind::F32 => reduce_as::<f32>(reduction, contributions),
        Kind::F64 => reduce_as::<f64>(reduction, contributions),
        Kind::Bf16 => reduce_as::<bf16>(reduction, contributions),
    }
}

fn reduce_as<T: Element>(reduction: Reduction, contributions: &[Vec<u8>]) -> Vec<u8> {
    let Some((first, rest)) = contributions.split_first() else { return Vec::new() };
    let mut result = first.clone();
    for (index, bytes) in result.chunks_exact_mut(T::BYTES).enumerate() {
        let at = index * T::BYTES;
        let others = rest.iter().map(|other| T::load(&other[at..at + T::BYTES]));
        let mut value = others.fold(T::load(bytes), |value, other| value.combine(other, reduction));
        if reduction == Reduction::Average {
            value = value.divide(contributions.len());
        }
        value.store(bytes);
    }
    result
}

#[cfg(test)]
mod tests;
