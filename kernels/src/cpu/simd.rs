//! Sixteen f32 lanes as one value, on every instruction path.
//!
//! Kernels are written once over [`Simd`]. A value of an implementing type proves that the machine has the path's
//! instructions, so arithmetic is safe to call and only memory access is unsafe. Every path has the same sixteen lanes
//! and reduces them in the same tree, so the order of every sum is the same on all paths.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(path = "avx512"), allow(dead_code, reason = "this build has only the paths of its machine"))]
mod avx512;
pub(super) mod isa;
mod math;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(path = "avx512")]
pub(super) use avx512::Avx512;
#[cfg(path = "dots")]
pub(super) use avx512::{Avx512Bf16, Avx512Vnni};
pub use isa::Isa;
pub(super) use math::{exp, from_bf16, to_bf16};
pub(super) use portable::Portable;

/// Number of f32 lanes of a value.
pub(super) const LANES: usize = 16;

/// The bits that turn an e4m3, whose exponent and mantissa are in the place of those of an f32, into its number unless
/// it is subnormal: the biases of the exponents are 7 and 127.
const E4M3_BIAS: i32 = (127 - 7) << 23;
/// The smallest e4m3 that is not subnormal.
const E4M3_LEAST: f32 = 1.0 / 64.0;

/// The number of an e4m3 other than NaN.
///
/// With the bias, the bits of a subnormal `m * 2^-9` stand for `(1 + m/8) * 2^-7`. Twice that less 2^-6 is the number,
/// and is the smaller of the two. For all other numbers, it is the larger. No f32 is subnormal, since CPUs are slow
/// with those.
#[inline(always)]
pub(super) fn e4m3(code: u8) -> f32 {
    let normal = f32::from_bits((u32::from(code & 0x7f) << 20) + E4M3_BIAS.cast_unsigned());
    let magnitude = normal.min(normal * 2.0 - E4M3_LEAST);
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The bits that turn an e4m3, whose exponent and mantissa are in the place of those of a bfloat16, into its number
/// unless it is subnormal.
const E4M3_BF16_BIAS: i16 = (127 - 7) << 7;
/// The bfloat16 of the e4m3 that are not above the largest subnormal one, by their lowest three bits.
const E4M3_BF16_SUBNORMAL: [i16; 8] = [0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60];

/// The number of an e4m3, divided by that of the f16 whose exponent and mantissa begin with those of the e4m3: the
/// biases of the exponents are 7 and 15. So are those of subnormals.
pub(super) const F16_PER_E4M3: f32 = 256.0;

/// A piece of code that is compiled once for each instruction path.
pub(super) trait Op {
    type Output;
    /// Runs the code. This function and all functions that it calls with `simd` must be `#[inline(always)]`: only then
    /// are they compiled with the path's instructions.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// One instruction path. Operations apply to each lane unless their documentation says otherwise.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F: Copy;
    /// Maximum number of rows per tile in a matrix product of several tiles. The sums of such a tile with one panel,
    /// and their operands, fit the registers.
    const TILE_ROWS: usize;
    /// Maximum number of rows of a tile that is the only one of a matrix product. At least [`Self::TILE_ROWS`], and at
    /// most [`LANES`], the rows that packing transposes at once.
    const SINGLE_TILE_ROWS: usize = Self::TILE_ROWS;
    /// Maximum number of sums that a tile of several panels keeps in registers.
    const TILE_SUMS: usize;

    /// Runs `op` in a separate function that is not inlined. Kernels call their inner loops this way: the loops have
    /// many variants, which would take minutes to compile if they were inlined into each other.
    fn call<O: Op>(self, op: O) -> O::Output;
    /// Returns `x` in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// Loads sixteen f32.
    ///
    /// # Safety
    ///
    /// Sixteen f32 are readable at `from`, at any alignment.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// Stores sixteen f32.
    ///
    /// # Safety
    ///
    /// Sixteen f32 are writable at `to`, at any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::F);
    /// Loads sixteen f16 and widens them.
    ///
    /// # Safety
    ///
    /// Sixteen u16 are readable at `from`.
    unsafe fn load_f16(self, from: *const u16) -> Self::F;
    /// Loads sixteen bfloat16 and widens them.
    ///
    /// # Safety
    ///
    /// Sixteen u16 are readable at `from`.
    unsafe fn load_bf16(self, from: *const u16) -> Self::F;
    /// Loads the even elements of thirty-two bfloat16 and widens them.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `from`.
    unsafe fn load_bf16_even(self, from: *const u16) -> Self::F;
    /// Loads the odd elements of thirty-two bfloat16 and widens them.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `from`.
    unsafe fn load_bf16_odd(self, from: *const u16) -> Self::F;
    /// One step of a bfloat16 dot product in each lane: `sum + odd(weights) * odd(pair)`, then
    /// `+ even(weights) * even(pair)`. `pair` holds the even element in its low half.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `weights`.
    unsafe fn dot_bf16(self, sum: Self::F, weights: *const u16, pair: u32) -> Self::F;
    /// Like [`Self::dot_bf16`], but with each pair of weights masked by `mask`. Each half of `mask` is all ones, which
    /// keeps that half of the pair, or zero, which drops it. A dropped half counts as zero, even if it is NaN.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `weights`.
    #[inline(always)]
    unsafe fn dot_bf16_masked(self, sum: Self::F, weights: *const u16, pair: u32, mask: u32) -> Self::F {
        let mut kept = [self.splat(0.0); 2];
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `weights`.
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

    /// Sixteen words of 32 bits: integer sums, or integers that are packed into words.
    type I: Copy;
    /// Number of inputs per step of [`Self::dot_u8`]: 2 or 4.
    const DOT_INPUTS: usize;
    /// Returns `x` in every lane.
    fn splat_i(self, x: i32) -> Self::I;
    /// Converts to f32. The conversion is exact for magnitudes up to 2²⁴.
    fn floats(self, x: Self::I) -> Self::F;
    /// Rounds numbers in -127 ..= 127 to the nearest integers, ties to even. The result is unspecified for other
    /// numbers.
    fn to_i8(self, x: Self::F) -> [i8; LANES];
    /// `sum + Σ weights[lane][i] * x[i]` over [`Self::DOT_INPUTS`] inputs, exactly. `weights` are unsigned,
    /// `[lane][DOT_INPUTS]`. `x` holds two 16-bit or four 8-bit integers.
    ///
    /// # Safety
    ///
    /// `16 * DOT_INPUTS` bytes are readable at `weights`.
    unsafe fn dot_u8(self, sum: Self::I, weights: *const u8, x: u32) -> Self::I;
    /// Rounds sixty-four numbers in -127 ..= 127 to the nearest integers, ties to even, and packs four into each word,
    /// in order. The result is unspecified for other numbers.
    #[inline(always)]
    fn quads_i8(self, x: [Self::F; 4]) -> Self::I {
        let mut bytes = [[0i8; LANES]; 4];
        for (bytes, x) in bytes.iter_mut().zip(x) {
            *bytes = self.to_i8(x);
        }
        // SAFETY: `bytes` holds sixty-four bytes.
        unsafe { self.load_i(bytes.as_ptr().cast()) }
    }
    /// Packs [`Self::DOT_INPUTS`] activations into a word: two of sixteen bits, or four of eight.
    #[cfg(test)]
    fn dot_word(x: &[i8]) -> u32 {
        if Self::DOT_INPUTS == 2 {
            let [low, high] = [x[0], x[1]].map(|x| u32::from(i16::from(x).cast_unsigned()));
            low | high << 16
        } else {
            u32::from_le_bytes([x[0], x[1], x[2], x[3]].map(i8::cast_unsigned))
        }
    }

    /// Loads sixty-four bytes and splits them: the low four bits of each byte, then its high four bits. Each of the two
    /// results holds four bytes per lane.
    ///
    /// # Safety
    ///
    /// Sixty-four bytes are readable at `from`.
    unsafe fn load_nibbles(self, from: *const u8) -> [Self::I; 2];
    /// Returns the initial value of [`Self::dot_quads`] for the integer sums `sum`: up to eight dot products are added
    /// to it, and [`Self::end_quads`] turns it into integer sums again. In between, a path may keep sums of sixteen
    /// bits.
    fn begin_quads(self, sum: Self::I) -> Self::I;
    /// `part + Σ weights[lane][i] * x[i]` over four inputs, exactly. `weights` holds four integers in 0 ..= 15 per
    /// lane, and `x` four 8-bit integers in -127 ..= 127.
    fn dot_quads(self, part: Self::I, weights: Self::I, x: u32) -> Self::I;
    /// Returns `sum` plus the dot products that were added to `begin_quads(sum)`.
    fn end_quads(self, sum: Self::I, part: Self::I) -> Self::I;
    /// Loads sixteen unsigned bytes as numbers.
    ///
    /// # Safety
    ///
    /// Sixteen bytes are readable at `from`.
    unsafe fn load_u8(self, from: *const u8) -> Self::F;
    /// Loads sixteen signed bytes as numbers.
    ///
    /// # Safety
    ///
    /// Sixteen bytes are readable at `from`.
    unsafe fn load_i8(self, from: *const u8) -> Self::F;
    /// Shifts each word right by `bits`, at most 31, and fills it with zeros.
    fn shift_right(self, x: Self::I, bits: u32) -> Self::I;
    /// Returns the lane of `table` that the lowest four bits of each word name.
    fn look_up(self, table: Self::F, index: Self::I) -> Self::F;
    /// Returns the lowest byte of each word, as a signed number.
    fn widen_i8(self, words: Self::I) -> Self::F;
    /// Returns the lowest byte of each word, as a float with four bits of exponent (e4m3). The result is unspecified
    /// for NaN.
    fn widen_e4m3(self, words: Self::I) -> Self::F;
    /// Converts thirty-two floats with four bits of exponent (e4m3) to bfloat16, exactly. A NaN stays one.
    ///
    /// # Safety
    ///
    /// Thirty-two bytes are readable at `from`, and thirty-two u16 are writable at `to`.
    unsafe fn e4m3_to_bf16(self, from: *const u8, to: *mut u16);
    /// Converts sixteen pairs of floats with four bits of exponent (e4m3) to f16: the first of each pair, and then the
    /// second of each. The results are the numbers divided by [`F16_PER_E4M3`], exactly. A NaN stays one.
    ///
    /// # Safety
    ///
    /// Thirty-two bytes are readable at `from`, and thirty-two u16 are writable at `to`.
    unsafe fn e4m3_pairs_to_f16(self, from: *const u8, to: *mut u16);

    /// Loads thirty-two i16, two per lane.
    ///
    /// # Safety
    ///
    /// Thirty-two u16 are readable at `from`.
    unsafe fn load_i(self, from: *const u16) -> Self::I;
    /// `sum + weights[lane][0] * pair[0] + weights[lane][1] * pair[1]`, where `weights` and `pair` hold i16. The i32
    /// sum wraps around on overflow. `pair` holds its first element in the low half.
    ///
    /// # Safety
    ///
    /// `pair` is readable.
    unsafe fn dot_i16(self, sum: Self::I, weights: Self::I, pair: *const u32) -> Self::I;
    /// Rounds thirty-two numbers in -32768 ..= 32767, `low` first, to the nearest integers, ties to even, and packs two
    /// into each word for [`Self::dot_i16`]. The result is unspecified for other numbers.
    fn pairs_i16(self, low: Self::F, high: Self::F) -> Self::I;
    /// Rounds thirty-two numbers, `low` first, to bfloat16, and packs two into each word for [`Self::dot_bf16`].
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
    /// Stores sixteen words.
    ///
    /// # Safety
    ///
    /// Sixteen words are writable at `to`.
    unsafe fn store_i(self, to: *mut u32, x: Self::I);
    /// Stores the sixteen words of each of `R` rows as `[16][R]`. `R` is at most sixteen.
    ///
    /// # Safety
    ///
    /// `16 * R` words are writable at `to`.
    #[inline(always)]
    unsafe fn store_transposed<const R: usize>(self, rows: &[Self::I; R], to: *mut u32) {
        for (r, row) in rows.iter().enumerate() {
            let mut words = [0; LANES];
            // SAFETY: `words` has room for sixteen words. By the caller's contract, `16 * R` words are writable at
            // `to`.
            unsafe {
                self.store_i(words.as_mut_ptr(), *row);
                for (lane, word) in words.into_iter().enumerate() {
                    *to.add(lane * R + r) = word;
                }
            }
        }
    }
    /// Loads sixteen biased exponents, as f32 with a mantissa of zero.
    ///
    /// # Safety
    ///
    /// Sixteen bytes are readable at `exponents`.
    unsafe fn powers(self, exponents: *const u8) -> Self::F;

    /// Prefetches a cache line. The address may be invalid.
    fn prefetch(self, line: *const u8);
    /// Prefetches a cache line that is not needed soon. The AVX-512 paths prefetch into the second-level cache, because
    /// more prefetches can be in flight to it than to the first-level cache. The address may be invalid.
    #[inline(always)]
    fn prefetch_far(self, line: *const u8) {
        self.prefetch(line);
    }

    /// Prefetches a cache line that is written soon, so that the store does not wait until another core gives the line
    /// up. The address may be invalid.
    #[inline(always)]
    fn prefetch_to_write(self, line: *const u8) {
        let _ = line;
    }

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once if the path has a fused instruction.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b + c`, rounded once on every path. Slow on a path without a fused instruction.
    #[inline(always)]
    fn fma_on_all_paths(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.fma(a, b, c)
    }
    /// The larger of `a` and `b`; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? x : y`; `y` if either is NaN.
    fn less(self, a: Self::F, b: Self::F, x: Self::F, y: Self::F) -> Self::F;
    /// Rounds to the nearest bfloat16, ties to even. A NaN becomes a quiet NaN.
    fn round_to_bf16(self, a: Self::F) -> Self::F;
    /// Rounds to the nearest integer, ties to even. Correct for magnitudes below 2³¹.
    fn round(self, a: Self::F) -> Self::F;
    /// 2 to the power of `n`, which is an integer in -126 ..= 127.
    fn exp2_integer(self, n: Self::F) -> Self::F;
    /// `p` times 2 to the power of `n`, where `n` is `x` rounded to an integer and `x` is at most 0. The result is 0 if
    /// `x` is below -126.
    #[inline(always)]
    fn scale_by_exp2(self, p: Self::F, n: Self::F, x: Self::F) -> Self::F {
        let lowest = self.splat(-126.0);
        let n = self.max(n, lowest);
        self.less(x, lowest, self.splat(0.0), self.mul(p, self.exp2_integer(n)))
    }
    /// The sum of all lanes. The upper half is added to the lower half until one lane is left.
    fn sum(self, a: Self::F) -> f32;
    /// The largest lane. Unspecified if a lane is NaN.
    fn largest(self, a: Self::F) -> f32;
    /// True if any lane is NaN.
    fn any_nan(self, a: Self::F) -> bool;

    /// Loads the first sixteen elements of `from`. Lanes beyond the end of `from` are `rest`.
    #[inline(always)]
    fn load_some(self, from: &[f32], rest: f32) -> Self::F {
        if from.len() >= LANES {
            // SAFETY: `from` holds sixteen elements.
            return unsafe { self.load(from.as_ptr()) };
        }
        let mut lanes = [rest; LANES];
        lanes[..from.len()].copy_from_slice(from);
        // SAFETY: `lanes` holds sixteen elements.
        unsafe { self.load(lanes.as_ptr()) }
    }

    /// Stores as many lanes of `x` as `to` has room for.
    #[inline(always)]
    fn store_some(self, to: &mut [f32], x: Self::F) {
        if to.len() >= LANES {
            // SAFETY: `to` has room for sixteen elements.
            return unsafe { self.store(to.as_mut_ptr(), x) };
        }
        let mut lanes = [0.0; LANES];
        // SAFETY: `lanes` has room for sixteen elements.
        unsafe { self.store(lanes.as_mut_ptr(), x) };
        to.copy_from_slice(&lanes[..to.len()]);
    }
}

#[cfg(test)]
mod tests;
