//! Sixteen f32 lanes as one value, on every instruction path.
//!
//! Kernels are written once over [`Simd`]. A value of an implementing type is the proof that the machine has its
//! instructions, so arithmetic is safe to call; only memory access is not. Because every path has the same sixteen
//! lanes and reduces them in the same tree, the order of every sum is the same everywhere.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(super) mod isa;
mod math;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512, Avx512Bf16, Avx512Vnni};
pub use isa::Isa;
pub(super) use math::{exp, from_bf16, to_bf16};
pub(super) use portable::Portable;

/// Lanes of a block.
pub(super) const LANES: usize = 16;

/// Code to be compiled once for each instruction path.
pub(super) trait Op {
    /// What it gives.
    type Output;
    /// Must be `#[inline(always)]`, and so must all that it calls with `simd`: only then is it compiled with the
    /// path's instructions.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// One instruction path. All operations are lane by lane unless they say otherwise.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F: Copy;
    /// Rows of the largest tile of a product: with one panel its sums fit the registers, beside what feeds them.
    const TILE_ROWS: usize;
    /// Sums that a tile of several panels keeps in registers, at most.
    const TILE_SUMS: usize;

    /// Runs `op` in a function of its own. Kernels call their inner loops this way: inlined into one another, their
    /// many variants take the compiler minutes.
    fn call<O: Op>(self, op: O) -> O::Output;
    fn splat(self, x: f32) -> Self::F;
    /// # Safety
    ///
    /// Sixteen f32 are readable at `from`, at any alignment.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// # Safety
    ///
    /// Sixteen f32 are writable at `to`, at any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::F);
    /// Sixteen halves, widened.
    ///
    /// # Safety
    ///
    /// Sixteen u16 are readable at `from`.
    unsafe fn load_f16(self, from: *const u16) -> Self::F;
    /// Sixteen bfloat16, widened.
    ///
    /// # Safety
    ///
    /// Sixteen u16 are readable at `from`.
    unsafe fn load_bf16(self, from: *const u16) -> Self::F;
    /// The even elements of thirty-two bfloat16, widened.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `from`.
    unsafe fn load_bf16_even(self, from: *const u16) -> Self::F;
    /// The odd elements of thirty-two bfloat16, widened.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `from`.
    unsafe fn load_bf16_odd(self, from: *const u16) -> Self::F;
    /// `sum + odd(weights) * odd(pair)`, then `+ even(weights) * even(pair)`: one step of a bfloat16 dot product in
    /// each lane. `pair` holds the even element in its low half.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `weights`.
    unsafe fn dot_bf16(self, sum: Self::F, weights: *const u16, pair: u32) -> Self::F;
    /// [`Self::dot_bf16`] with only those bits of each pair of weights that are set in `mask`, which keeps or drops each
    /// half as a whole: what is dropped counts as zero, whatever it is.
    ///
    /// # Safety
    ///
    /// As [`Self::dot_bf16`]'s.
    #[inline(always)]
    unsafe fn dot_bf16_masked(self, sum: Self::F, weights: *const u16, pair: u32, mask: u32) -> Self::F {
        let mut kept = [self.splat(0.0); 2];
        // SAFETY: the caller's contract.
        unsafe {
            if mask & 0xffff != 0 {
                kept[0] = self.load_bf16_even(weights);
            }
            if mask >> 16 != 0 {
                kept[1] = self.load_bf16_odd(weights);
            }
        }
        let [even, odd] = [pair << 16, pair & 0xffff_0000].map(f32::from_bits);
        self.fma(kept[0], self.splat(even), self.fma(kept[1], self.splat(odd), sum))
    }

    /// Sixteen i32, as sums of [`Self::dot_u8`].
    type I: Copy;
    /// Inputs of one step of [`Self::dot_u8`]: 2 or 4.
    const DOT_INPUTS: usize;
    fn splat_i(self, x: i32) -> Self::I;
    /// Exact for magnitudes up to 2²⁴.
    fn floats(self, x: Self::I) -> Self::F;
    /// The nearest integers, ties to even, of numbers in -127 ..= 127; others come to anything.
    fn to_i8(self, x: Self::F) -> [i8; LANES];
    /// `sum + Σ weights[lane][i] * x[i]` over [`Self::DOT_INPUTS`] inputs, exactly; `weights` unsigned,
    /// `[lane][DOT_INPUTS]`, and `x` as [`Self::dot_word`] makes it.
    ///
    /// # Safety
    ///
    /// `16 * DOT_INPUTS` bytes are readable at `weights`.
    unsafe fn dot_u8(self, sum: Self::I, weights: *const u8, x: u32) -> Self::I;
    /// Sixty-four numbers in -127 ..= 127, in their order, rounded to the nearest integers, ties to even: four in a word.
    /// Other numbers give any integers.
    #[inline(always)]
    fn quads_i8(self, x: [Self::F; 4]) -> Self::I {
        let mut bytes = [[0i8; LANES]; 4];
        for (bytes, x) in bytes.iter_mut().zip(x) {
            *bytes = self.to_i8(x);
        }
        // SAFETY: `bytes` holds sixty-four.
        unsafe { self.load_i(bytes.as_ptr().cast()) }
    }
    /// So many activations as one word: two of sixteen bits, or four of eight.
    #[cfg(test)]
    fn dot_word(x: &[i8]) -> u32 {
        if Self::DOT_INPUTS == 2 {
            let [low, high] = [x[0], x[1]].map(|x| u32::from(i16::from(x).cast_unsigned()));
            low | high << 16
        } else {
            u32::from_le_bytes([x[0], x[1], x[2], x[3]].map(i8::cast_unsigned))
        }
    }

    /// Thirty-two i16, two for each lane.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `from`.
    unsafe fn load_i(self, from: *const u16) -> Self::I;
    /// `sum + weights[lane][0] * pair[0] + weights[lane][1] * pair[1]` of i16, exactly, but for wrapping around. `pair` holds
    /// its first in the low half.
    ///
    /// # Safety
    ///
    /// `pair` is readable.
    unsafe fn dot_i16(self, sum: Self::I, weights: Self::I, pair: *const u32) -> Self::I;
    /// Thirty-two numbers in -32768 ..= 32767, `low` first, rounded to the nearest integers, ties to even: two in a word as
    /// [`Self::dot_i16`] takes them. Other numbers give any integers.
    fn pairs_i16(self, low: Self::F, high: Self::F) -> Self::I;
    /// Thirty-two numbers, `low` first, rounded to bfloat16: two in a word as [`Self::dot_bf16`] takes them.
    #[inline(always)]
    fn pairs_bf16(self, low: Self::F, high: Self::F) -> Self::I {
        let mut lanes = [0.0; 2 * LANES];
        self.store_some(&mut lanes[..LANES], self.round_to_bf16(low));
        self.store_some(&mut lanes[LANES..], self.round_to_bf16(high));
        let mut words = [0u32; LANES];
        for (word, pair) in words.iter_mut().zip(lanes.as_chunks::<2>().0) {
            *word = pair[0].to_bits() >> 16 | pair[1].to_bits();
        }
        // SAFETY: `words` holds thirty-two u16.
        unsafe { self.load_i(words.as_ptr().cast()) }
    }
    /// # Safety
    ///
    /// Sixteen words are writable at `to`.
    unsafe fn store_i(self, to: *mut u32, x: Self::I);
    /// Stores the words of `R` rows, at most sixteen, as `[16][R]`.
    ///
    /// # Safety
    ///
    /// `16 * R` words are writable at `to`.
    #[inline(always)]
    unsafe fn store_transposed<const R: usize>(self, rows: &[Self::I; R], to: *mut u32) {
        for (r, row) in rows.iter().enumerate() {
            let mut words = [0; LANES];
            // SAFETY: `words` has room for sixteen, and the rest is the caller's contract.
            unsafe {
                self.store_i(words.as_mut_ptr(), *row);
                for (lane, word) in words.into_iter().enumerate() {
                    *to.add(lane * R + r) = word;
                }
            }
        }
    }
    /// f32 with sixteen bytes as their exponents, and nothing else.
    ///
    /// # Safety
    ///
    /// Sixteen bytes are readable at `exponents`.
    unsafe fn powers(self, exponents: *const u8) -> Self::F;

    /// Asks for a cache line that will be read soon; any address will do.
    fn prefetch(self, line: *const u8);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b + c`, rounded once on every path, which is slow without the instruction.
    #[inline(always)]
    fn fma_on_all_paths(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.fma(a, b, c)
    }
    /// The larger; `b` where either is not a number.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? x : y`; `y` where `a` or `b` is not a number.
    fn less(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// To the nearest bfloat16, ties to even; a NaN stays a quiet one.
    fn round_to_bf16(self, a: Self::F) -> Self::F;
    /// To the nearest integer, ties to even. Exact for magnitudes below 2³¹.
    fn round(self, a: Self::F) -> Self::F;
    /// 2 to the power of `n`, an integer in -126 ..= 127.
    fn exp2_integer(self, n: Self::F) -> Self::F;
    /// `p` times 2 to the power of `n`, the integer nearest to `x`, which is at most 0; 0 where `x` is below -126.
    #[inline(always)]
    fn scale_by_exp2(self, p: Self::F, n: Self::F, x: Self::F) -> Self::F {
        let lowest = self.splat(-126.0);
        let n = self.max(n, lowest);
        self.less(x, lowest, self.splat(0.0), self.mul(p, self.exp2_integer(n)))
    }
    /// The lanes' sum: halves are added lane by lane until one is left.
    fn sum(self, a: Self::F) -> f32;
    /// The largest lane; meaningless when one is not a number.
    fn largest(self, a: Self::F) -> f32;
    /// Whether any lane is not a number.
    fn any_nan(self, a: Self::F) -> bool;

    /// The first sixteen elements of `from`, or all that there are and `rest` in the other lanes.
    #[inline(always)]
    fn load_some(self, from: &[f32], rest: f32) -> Self::F {
        if from.len() >= LANES {
            // SAFETY: sixteen elements are there.
            return unsafe { self.load(from.as_ptr()) };
        }
        let mut lanes = [rest; LANES];
        lanes[..from.len()].copy_from_slice(from);
        // SAFETY: `lanes` holds sixteen.
        unsafe { self.load(lanes.as_ptr()) }
    }

    /// Stores sixteen lanes, or as many as `to` has room for.
    #[inline(always)]
    fn store_some(self, to: &mut [f32], x: Self::F) {
        if to.len() >= LANES {
            // SAFETY: there is room for sixteen.
            return unsafe { self.store(to.as_mut_ptr(), x) };
        }
        let mut lanes = [0.0; LANES];
        // SAFETY: `lanes` has room for sixteen.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        to.copy_from_slice(&lanes[..to.len()]);
    }
}

#[cfg(test)]
mod tests;
