//! Computes a matrix product whose operands are in device memory.

use std::ffi::CStr;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use tutti_emulated_exports::{Driver, DriverError, StreamContext};

use crate::problem::{Kind, Matrix, Problem, Variant};

/// A matrix product with its factors and the addresses of its operands.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The product.
    pub problem: Problem,
    /// Order of the sums.
    pub variant: Variant,
    /// Factor of op(A) op(B).
    pub alpha: f32,
    /// Factor of C. If it is 0, C is not read.
    pub beta: f32,
    /// Device addresses of A, B, C and D.
    pub addresses: [u64; 4],
    /// Device address and size in bytes of the workspace. The size is 0 for an algorithm without workspace.
    pub workspace: (u64, u64),
}

/// Byte that fills the workspace before a matrix product, so that a program that keeps data in the workspace fails.
const SCRIBBLE: u8 = 0xff;

/// Converts the elements in `bytes` to f32.
fn decode(kind: Kind, bytes: &[u8], into: &mut [f32]) {
    match kind {
        Kind::F32 => {
            for (into, b) in into.iter_mut().zip(bytes.chunks_exact(4)) {
                *into = f32::from_ne_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Kind::F16 => {
            let halves: Vec<f16> = bytes.chunks_exact(2).map(|b| f16::from_ne_bytes([b[0], b[1]])).collect();
            halves.convert_to_f32_slice(into);
        }
        Kind::Bf16 => {
            for (into, b) in into.iter_mut().zip(bytes.chunks_exact(2)) {
                *into = bf16::from_ne_bytes([b[0], b[1]]).to_f32();
            }
        }
    }
}

/// Stores an element, rounded to nearest, ties to even.
fn encode(kind: Kind, value: f32, bytes: &mut [u8]) {
    match kind {
        Kind::F32 => bytes.copy_from_slice(&value.to_ne_bytes()),
        Kind::F16 => bytes.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
        Kind::Bf16 => bytes.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
    }
}

/// Rounds an f32 to the ten bits of mantissa of TF32, to nearest, ties away from zero (PTX `cvt.rna.tf32`).
pub fn tf32(value: f32) -> f32 {
    if value.is_finite() { f32::from_bits((value.to_bits() + 0x1000) & !0x1fff) } else { value }
}

/// Access to the operands of a matrix product in device memory.
#[derive(Clone, Copy)]
struct Operands {
    driver: Driver,
    of: StreamContext,
}

impl Operands {
    /// Reads one matrix of a batch as `rows` lines of `columns` values. The gaps between the lines in memory are not
    /// read.
    fn rows(&self, matrix: &Matrix, address: u64, batch: usize, by: &CStr) -> Result<Vec<f32>, DriverError> {
        let (rows, columns) = (matrix.rows, matrix.columns);
        let mut values = vec![0.0; rows * columns];
        if matrix.column_stride == 1 {
            for (row, line) in values.chunks_exact_mut(columns).enumerate() {
                self.line(matrix, address, batch * matrix.batch_stride + row * matrix.row_stride, line, by)?;
            }
        } else {
            let mut line = vec![0.0; rows];
            for column in 0..columns {
                let start = batch * matrix.batch_stride + column * matrix.column_stride;
                self.line(matrix, address, start, &mut line, by)?;
                for (row, &value) in line.iter().enumerate() {
                    values[row * columns + column] = value;
                }
            }
        }
        Ok(values)
    }

    /// Reads contiguous elements of device memory, from element `start` on.
    fn line(
        &self,
        matrix: &Matrix,
        address: u64,
        start: usize,
        line: &mut [f32],
        by: &CStr,
    ) -> Result<(), DriverError> {
        let size = matrix.kind.bytes();
        // SAFETY: the slice lives until this function returns, and the device runs no other work meanwhile.
        let bytes = unsafe {
            self.driver.readable(self.of, address + start as u64 * size, line.len() as u64 * size, by)
        }?;
        decode(matrix.kind, bytes, line);
        Ok(())
    }
}

/// Number of interleaved partial sums of an inner product.
const LANES: usize = 16;

/// Computes an inner product: [`LANES`] interleaved sums, which are then added in order. The products of the elements
/// after the last full group of [`LANES`] are added last.
#[inline(always)]
fn inner_product(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let sum: f32 = lanes.iter().sum();
    rest.fold(sum, |sum, (a, b)| sum + a * b)
}

#[inline(always)]
fn lines(a: &[f32], b: &[f32], k: usize, sums: &mut [f32]) {
    let n = b.len() / k;
    for (a, sums) in a.chunks_exact(k).zip(sums.chunks_exact_mut(n)) {
        for (b, sum) in b.chunks_exact(k).zip(sums) {
            *sum = inner_product(a, b);
        }
    }
}

/// Computes the same sums as `lines`, bit for bit, with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn lines_avx2(a: &[f32], b: &[f32], k: usize, sums: &mut [f32]) {
    lines(a, b, k, sums);
}

fn fastest_lines(a: &[f32], b: &[f32], k: usize, sums: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { lines_avx2(a, b, k, sums) };
    }
    lines(a, b, k, sums);
}

/// Returns the inner products of each line of `a` with each line of `b`. A line has `k` values. Line `i` of the result
/// belongs to line `i` of `a`.
pub fn multiply(a: &[f32], b: &[f32], k: usize) -> Vec<f32> {
    /// Minimum number of multiplications per thread. With fewer, the start of a thread would cost more time than it
    /// saves.
    const WORTH_A_THREAD: usize = 1 << 20;
    let (m, n) = (a.len() / k, b.len() / k);
    let mut sums = vec![0.0; m * n];
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = (m * n * k / WORTH_A_THREAD).clamp(1, processors).min(m);
    let share = m.div_ceil(threads);
    std::thread::scope(|scope| {
        let parts = a.chunks(share * k).zip(sums.chunks_mut(share * n));
        for (index, (a, sums)) in parts.enumerate() {
            if index + 1 == threads {
                fastest_lines(a, b, k, sums);
            } else {
                scope.spawn(move || fastest_lines(a, b, k, sums));
            }
        }
    });
    sums
}

/// Computes a matrix product. The driver's queue calls this function when the product is next in its stream.
///
/// # Errors
///
/// `ILLEGAL_ADDRESS` if an operand does not lie in an allocation.
pub fn run(driver: Driver, of: StreamContext, call: &Call) -> Result<(), DriverError> {
    let problem = &call.problem;
    let operands = Operands { driver, of };
    let [a, b, c, d] = call.addresses;
    let (address, bytes) = call.workspace;
    if bytes > 0 {
        // SAFETY: the slice lives until the end of this statement, and the device runs no other work meanwhile.
        unsafe { driver.writable(of, address, bytes, c"cublasLtMatmul (workspace)") }?.fill(SCRIBBLE);
    }
    let (m, n, k) = (problem.d.rows, problem.d.columns, problem.a.columns);
    for batch in 0..problem.batch {
        let mut a = operands.rows(&problem.a, a, batch, c"cublasLtMatmul (A)")?;
        let mut b = operands.rows(&problem.b.transposed(), b, batch, c"cublasLtMatmul (B)")?;
        if problem.tf32 {
            a.iter_mut().chain(&mut b).for_each(|value| *value = tf32(*value));
        }
        if call.variant == Variant::Reverse {
            a.chunks_exact_mut(k).chain(b.chunks_exact_mut(k)).for_each(<[f32]>::reverse);
        }
        let mut values = multiply(&a, &b, k);
        values.iter_mut().for_each(|value| *value *= call.alpha);
        if call.beta != 0.0 {
            let c = operands.rows(&problem.c, c, batch, c"cublasLtMatmul (C)")?;
            values.iter_mut().zip(c).for_each(|(value, c)| *value += call.beta * c);
        }
        if let Some((address, stride, kind)) = problem.bias {
            let mut bias = vec![0.0; m];
            let vector = Matrix { kind, ..problem.d };
            operands.line(&vector, address, batch * stride, &mut bias, c"cublasLtMatmul (bias)")?;
            for (line, bias) in values.chunks_exact_mut(n).zip(bias) {
                line.iter_mut().for_each(|value| *value += bias);
            }
        }
        store(driver, of, d, &problem.d, batch, |row, column| values[row * n + column])?;
    }
    Ok(())
}

/// Stores one matrix of D, line by line. The memory between the lines keeps its content.
fn store(
    driver: Driver,
    of: StreamContext,
    address: u64,
    d: &Matrix,
    batch: usize,
    value: impl Fn(usize, usize) -> f32,
) -> Result<(), DriverError> {
    let rows_outside = d.column_stride == 1;
    let (lines, length) = if rows_outside { (d.rows, d.columns) } else { (d.columns, d.rows) };
    let step = if rows_outside { d.row_stride } else { d.column_stride };
    let size = d.kind.bytes();
    for line in 0..lines {
        let start = address + (batch * d.batch_stride + line * step) as u64 * size;
        // SAFETY: the slice lives for one iteration of the loop, and the device runs no other work meanwhile.
        let bytes = unsafe { driver.writable(of, start, length as u64 * size, c"cublasLtMatmul (D)") }?;
        for (index, bytes) in bytes.chunks_exact_mut(size as usize).enumerate() {
            let (row, column) = if rows_outside { (line, index) } else { (index, line) };
            encode(d.kind, value(row, column), bytes);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
