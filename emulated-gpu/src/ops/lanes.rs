//! Loops over the lanes of rows.

use crate::program::{Operation, Width};

/// An operation and the widths of its operands.
#[derive(Clone, Copy)]
pub(crate) struct Compute {
    pub run: Operation,
    pub into: Width,
    pub from: &'static [Width],
    /// Value of `Instruction::detail` for the operation.
    pub detail: u32,
}

/// A type of values in the lanes of a row.
pub(crate) trait Lane: Copy + Default {
    const WIDTH: Width;
}

macro_rules! lane {
    ($($T:ty: $width:ident),*) => { $(impl Lane for $T { const WIDTH: Width = Width::$width; })* };
}
lane!(u16: W16, i16: W16, u32: W32, i32: W32, f32: W32, u64: W64, i64: W64, f64: W64);

/// Makes an operation that computes each lane of the target by an expression of the same lane of the sources.
///
/// The compiler does not know the loop's bound, so it makes a vector loop. The results go to a separate row first,
/// because the target may also be a source.
macro_rules! compute {
    ($R:ty; $($a:ident: $T:ty = $index:literal),+; |$detail:ident| $e:expr) => {{
        use $crate::ops::lanes::Lane;
        #[cfg_attr(
            target_arch = "x86_64",
            target_feature(enable = "avx2,bmi1,bmi2,fma,f16c,lzcnt,popcnt")
        )]
        unsafe fn run(
            warp: &mut $crate::exec::Warp<'_>,
            instruction: &$crate::program::Instruction,
            mask: u32,
        ) {
            let mut result = std::mem::MaybeUninit::<$crate::exec::Row<$R>>::uninit();
            let target = result.as_mut_ptr().cast::<$R>();
            #[allow(unused_variables)]
            let $detail = instruction.detail;
            // SAFETY: the lowering gave the operands the widths that `Compute` names. A row has 32 lanes, and the loop
            // writes all of them.
            unsafe {
                $(let $a = warp.row::<$T>(instruction.from[$index]);)+
                for lane in 0..warp.lanes() {
                    $(let $a = *$a.add(lane);)+
                    *target.add(lane) = $e;
                }
                warp.put(instruction.into[0], mask, result.assume_init_ref());
            }
        }
        $crate::ops::lanes::Compute {
            run,
            into: <$R>::WIDTH,
            from: &[$(<$T>::WIDTH),+],
            detail: 0,
        }
    }};
}

macro_rules! unary {
    ($T:ty => $R:ty, |$a:ident| $e:expr) => {
        $crate::ops::lanes::compute!($R; $a: $T = 0; |_detail| $e)
    };
}

macro_rules! binary {
    ($T:ty, $U:ty => $R:ty, |$a:ident, $b:ident| $e:expr) => {
        $crate::ops::lanes::compute!($R; $a: $T = 0, $b: $U = 1; |_detail| $e)
    };
}

macro_rules! ternary {
    ($T:ty, $U:ty, $V:ty => $R:ty, |$a:ident, $b:ident, $c:ident| $e:expr) => {
        $crate::ops::lanes::compute!($R; $a: $T = 0, $b: $U = 1, $c: $V = 2; |_detail| $e)
    };
}

pub(super) use {binary, compute, ternary, unary};
