//! `ldmatrix` and `mma.sync`.
//!
//! Fragments (PTX, "Matrix Fragments for mma.m16n8k16") are made of 8x8 tiles. Below, a lane's index is `4g + t`. A
//! register of A is one tile: a lane holds the columns `2t` and `2t+1` of row `g`. A register of B is one tile: a lane
//! holds the rows `2t` and `2t+1` of column `g`. A tile of C or D takes two registers, for the columns `2t` and `2t+1`
//! of row `g`. So the 32 lanes of a register of A, read as 16-bit values, are a tile in row order. The lanes of a
//! register of B are a tile in column order.

use crate::exec::{Access, Addresses, Row, Warp};
use crate::program::{Instruction, Operation};

use super::half::{Binary16, Brain, Half};
use super::rounding::canonical;

/// Flag in `detail` of `ldmatrix`: the matrix is transposed.
pub(crate) const TRANSPOSED: u32 = 1;

/// `ldmatrix`: loads one matrix per listed target. Lane 8m + r holds the address of row r of matrix m.
pub(crate) unsafe fn load_matrix(warp: &mut Warp<'_>, instruction: &Instruction, _: u32) {
    let program = warp.program;
    let targets = instruction.list_into(program);
    let mask = u32::MAX >> (32 - 8 * targets.len());
    let mut host = Row::<u64>::zero();
    // SAFETY: the lowering chose the row of addresses and targets of 32 bits, and `resolve` checks 16 bytes per lane.
    unsafe {
        if warp.resolve(Addresses::of(instruction), mask, 16, Access::Read, &mut host).is_none() {
            return;
        }
        for (matrix, &target) in targets.iter().enumerate() {
            let mut rows = [[0u16; 8]; 8];
            for (row, values) in rows.iter_mut().enumerate() {
                *values = *(host.0[matrix * 8 + row] as *const [u16; 8]);
            }
            if instruction.detail & TRANSPOSED != 0 {
                let given = rows;
                for (row, values) in rows.iter_mut().enumerate() {
                    for (column, value) in values.iter_mut().enumerate() {
                        *value = given[column][row];
                    }
                }
            }
            *warp.row::<[[u16; 8]; 8]>(target) = rows;
        }
    }
}

/// Shape and inputs of `mma.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mma {
    /// m16n8k16, bf16 or f16 inputs.
    Brain16,
    Half16,
    /// m16n8k8, bf16 or f16 inputs.
    Brain8,
    Half8,
    /// m16n8k8, tf32 inputs.
    Tensor8,
}

impl Mma {
    /// Returns the number of registers of A and of B.
    pub fn registers(self) -> (usize, usize) {
        match self {
            Mma::Brain16 | Mma::Half16 | Mma::Tensor8 => (4, 2),
            Mma::Brain8 | Mma::Half8 => (2, 1),
        }
    }
}

/// Returns the operation of an `mma.sync` with f32 sums. The instruction lists the registers of D, A, B and C.
pub(crate) fn multiply_accumulate(shape: Mma) -> Operation {
    macro_rules! halves {
        ($H:ty, $steps:literal) => {{
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
            unsafe fn run(warp: &mut Warp<'_>, instruction: &Instruction, _: u32) {
                // SAFETY: the lowering listed four targets and the fragments' registers.
                unsafe { multiply_halves::<$H, $steps>(warp, instruction) }
            }
            run
        }};
    }
    match shape {
        Mma::Brain16 => halves!(Brain, 2),
        Mma::Half16 => halves!(Binary16, 2),
        Mma::Brain8 => halves!(Brain, 1),
        Mma::Half8 => halves!(Binary16, 1),
        Mma::Tensor8 => multiply_tensor,
    }
}

/// Returns the index of column n among the eight sums of a row. Even columns come first, so that each half of the sums
/// belongs to one register of C.
const fn column(n: usize) -> usize {
    n / 2 + n % 2 * 4
}

/// Computes D = A B + C. The inner dimension k is `STEPS` tiles of 8.
///
/// # Safety
///
/// The instruction lists four targets, 2 `STEPS` registers of A, `STEPS` of B and four of C, all of 32 bits.
#[inline(always)]
unsafe fn multiply_halves<H: Half, const STEPS: usize>(warp: &mut Warp<'_>, instruction: &Instruction) {
    let program = warp.program;
    let sources = instruction.list_from(program);
    let (a, rest) = sources.split_at(2 * STEPS);
    let (b, c) = rest.split_at(STEPS);
    let mut right = [[[0f32; 8]; 8]; STEPS];
    let mut sums = [[[0f32; 8]; 8]; 2];
    // SAFETY: the caller promises that the instruction lists these registers, all of 32 bits.
    unsafe {
        for step in 0..STEPS {
            let tile = &*warp.row::<[[u16; 8]; 8]>(b[step]);
            for n in 0..8 {
                for k in 0..8 {
                    right[step][k][column(n)] = H::widen(tile[n][k]);
                }
            }
        }
        for (half, sums) in sums.iter_mut().enumerate() {
            let (even, odd) =
                (&*warp.row::<[[f32; 4]; 8]>(c[2 * half]), &*warp.row::<[[f32; 4]; 8]>(c[2 * half + 1]));
            for g in 0..8 {
                let mut row = [0f32; 8];
                row[..4].copy_from_slice(&even[g]);
                row[4..].copy_from_slice(&odd[g]);
                for step in 0..STEPS {
                    let tile = &*warp.row::<[[u16; 8]; 8]>(a[2 * step + half]);
                    for k in 0..8 {
                        let left = H::widen(tile[g][k]);
                        for n in 0..8 {
                            row[n] = left.mul_add(right[step][k][n], row[n]);
                        }
                    }
                }
                sums[g] = row;
            }
        }
    }
    // SAFETY: the caller promises that the instruction lists four targets of 32 bits.
    unsafe { put_sums(warp, instruction, &sums) };
}

/// Writes D. A register of D may also be one of A, B or C, so the caller has read these before.
///
/// # Safety
///
/// The instruction lists four targets of 32 bits.
#[inline(always)]
unsafe fn put_sums(warp: &mut Warp<'_>, instruction: &Instruction, sums: &[[[f32; 8]; 8]; 2]) {
    let program = warp.program;
    for (half, sums) in sums.iter().enumerate() {
        for odd in 0..2 {
            let row = instruction.list_into(program)[2 * half + odd];
            // SAFETY: the caller promises that the target is a row of 32 lanes of 32 bits.
            let target = unsafe { &mut *warp.row::<[[f32; 4]; 8]>(row) };
            for g in 0..8 {
                for t in 0..4 {
                    target[g][t] = canonical(sums[g][4 * odd + t]);
                }
            }
        }
    }
}

/// `mma.sync` of tf32 inputs. Registers of A hold the rows `g` and `g+8` of the columns `t` and `t+4`. Registers of B
/// hold the rows `t` and `t+4` of column `g`.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
unsafe fn multiply_tensor(warp: &mut Warp<'_>, instruction: &Instruction, _: u32) {
    let program = warp.program;
    let sources = instruction.list_from(program);
    // The low 13 bits of an input, which tf32 does not have, are ignored.
    let cut = |bits: u32| f32::from_bits(bits & 0xffff_e000);
    let mut sums = [[[0f32; 8]; 8]; 2];
    // SAFETY: the lowering listed four registers of A, two of B and four of C.
    unsafe {
        let read = |index: usize| warp.get::<u32>(sources[index]);
        let (b, c) = ([read(4), read(5)], [read(6), read(7), read(8), read(9)]);
        for (half, sums) in sums.iter_mut().enumerate() {
            let a = [read(half), read(half + 2)];
            for (g, row) in sums.iter_mut().enumerate() {
                for n in 0..8 {
                    let mut sum = f32::from_bits(c[2 * half + n % 2].0[4 * g + n / 2]);
                    for k in 0..8 {
                        let (left, right) = (a[k / 4].0[4 * g + k % 4], b[k / 4].0[4 * n + k % 4]);
                        sum = cut(left).mul_add(cut(right), sum);
                    }
                    row[column(n)] = sum;
                }
            }
        }
        put_sums(warp, instruction, &sums);
    }
}
