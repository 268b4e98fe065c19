//! The AVX2 path: two 256-bit registers per value.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{E4M3_BF16_BIAS, E4M3_BF16_SUBNORMAL, E4M3_BIAS, E4M3_LEAST, LANES, Op, Simd};

/// Proof that the machine has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2(());

impl Avx2 {
    /// # Safety
    ///
    /// The machine has AVX2, FMA and F16C.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::cpu) unsafe fn run<O: Op>(op: O) -> O::Output {
        op.run(Self(()))
    }
}

type F = [__m256; 2];

/// Wraps calls of intrinsics in `unsafe`. Use it only where a value of type [`Avx2`] is in scope: such a value exists
/// only on a machine that has the instructions.
macro_rules! avx2 {
    ($($body:tt)*) => {{
        // SAFETY: a value of type `Avx2` exists only on a machine that has the instructions. By the caller's contract,
        // all accessed memory is valid.
        unsafe { $($body)* }
    }};
}

/// Reduces all lanes to one with `op`: the upper half is combined with the lower half until one lane is left.
macro_rules! fold {
    ($a:expr, $op256:ident, $op128:ident) => {
        avx2! {{
            let a = $op256($a[0], $a[1]);
            let a = $op128(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = $op128(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32($op128(a, _mm_movehdup_ps(a)))
        }}
    };
}

/// Returns `from`, in a way that hides from the compiler that the result equals the argument. Otherwise the compiler
/// loads the even and the odd halves of pairs together and keeps both in registers. A tile of six rows leaves too few
/// registers for that.
#[allow(clippy::pointers_in_nomem_asm_block)] // The assembly reads no memory.
#[inline(always)]
fn distinct_address(mut from: *const u16) -> *const u16 {
    // SAFETY: the assembly is empty.
    unsafe { asm!("/* {0} */", inout(reg) from, options(pure, nomem, nostack, preserves_flags)) };
    from
}

/// [`Simd::dot_i16`] in assembly. With intrinsics, the compiler would sum the products of several steps before it adds
/// them to the sums, or load the pairs of several rows together. There are too few registers for either.
///
/// # Safety
///
/// The machine has AVX2, and `pair` is readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_products(
    [mut low, mut high]: [__m256i; 2],
    weights: [__m256i; 2],
    pair: *const u32,
) -> [__m256i; 2] {
    // SAFETY: by the caller's contract, the machine has AVX2, and `pair` is readable.
    unsafe {
        asm!(
            "vpbroadcastd {x}, dword ptr [{pair}]",
            "vpmaddwd {product}, {w_low}, {x}",
            "vpmaddwd {x}, {w_high}, {x}",
            "vpaddd {low}, {low}, {product}",
            "vpaddd {high}, {high}, {x}",
            low = inout(ymm_reg) low,
            high = inout(ymm_reg) high,
            w_low = in(ymm_reg) weights[0],
            w_high = in(ymm_reg) weights[1],
            pair = in(reg) pair,
            x = out(ymm_reg) _,
            product = out(ymm_reg) _,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    [low, high]
}

impl Avx2 {
    /// [`Simd::round_to_bf16`] of eight lanes. This is a method because a closure would not be compiled with the path's
    /// instructions.
    #[inline(always)]
    fn half_to_bf16(self, x: __m256) -> __m256 {
        avx2! {
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let nearest = _mm256_castsi256_ps(_mm256_add_epi32(bits, up));
            let quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000)));
            let rounded = _mm256_blendv_ps(nearest, quiet, _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
            _mm256_and_ps(rounded, _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32)))
        }
    }

    /// [`Simd::look_up`] of eight lanes.
    #[inline(always)]
    fn look_up_half(self, table: F, index: __m256i) -> __m256 {
        avx2! {
            let (low, high) = (_mm256_permutevar8x32_ps(table[0], index), _mm256_permutevar8x32_ps(table[1], index));
            // Bit 3 of the index becomes the sign, which selects the half of the table.
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index)))
        }
    }

    /// [`Simd::e4m3_to_bf16`] of sixteen floats.
    ///
    /// # Safety
    ///
    /// Sixteen bytes are readable at `from`, and sixteen u16 are writable at `to`.
    #[inline(always)]
    unsafe fn half_e4m3_to_bf16(self, from: *const u8, to: *mut u16) {
        avx2! {
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            let magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_xor_si256(codes, magnitude));
            let bits = _mm256_slli_epi16::<4>(magnitude);
            let normal = _mm256_add_epi16(bits, _mm256_set1_epi16(E4M3_BF16_BIAS));
            // The bytes of entry `i` of the table are at `2 * i` and `2 * i + 1`.
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(E4M3_BF16_SUBNORMAL.as_ptr().cast()));
            let entry = _mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x0202));
            let entry = _mm256_add_epi16(entry, _mm256_set1_epi16(0x0100));
            let subnormal = _mm256_shuffle_epi8(table, entry);
            let is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude);
            let number = _mm256_blendv_epi8(normal, subnormal, is_small);
            let is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
            let number = _mm256_or_si256(_mm256_or_si256(number, is_nan), sign);
            _mm256_storeu_si256(to.cast(), number);
        }
    }

    /// [`Simd::widen_e4m3`] of eight lanes.
    #[inline(always)]
    fn widen_half_e4m3(self, words: __m256i) -> __m256 {
        avx2! {
            let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(words, _mm256_set1_epi32(0x80)));
            let number = _mm256_slli_epi32::<20>(_mm256_and_si256(words, _mm256_set1_epi32(0x7f)));
            let normal = _mm256_castsi256_ps(_mm256_add_epi32(number, _mm256_set1_epi32(E4M3_BIAS)));
            let subnormal = _mm256_fmsub_ps(normal, _mm256_set1_ps(2.0), _mm256_set1_ps(E4M3_LEAST));
            _mm256_or_ps(_mm256_castsi256_ps(sign), _mm256_min_ps(normal, subnormal))
        }
    }
}

/// [`Simd::e4m3_pairs_to_f16`] for machines with AVX2.
///
/// # Safety
///
/// The machine has AVX2. Thirty-two bytes are readable at `from`, and thirty-two u16 are writable at `to`.
#[inline(always)]
pub(super) unsafe fn e4m3_pairs_to_f16(from: *const u8, to: *mut u16) {
    // SAFETY: by the caller's contract.
    unsafe {
        let pairs = _mm256_loadu_si256(from.cast());
        let magnitudes = _mm256_and_si256(pairs, _mm256_set1_epi8(0x7f));
        let are_nan = _mm256_cmpeq_epi8(magnitudes, _mm256_set1_epi8(0x7f));
        // The sign, a zero, and then the seven bits of the magnitude.
        let kept = _mm256_set1_epi16(0xbf80_u16.cast_signed());
        let first = _mm256_and_si256(_mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(pairs)), kept);
        let second = _mm256_and_si256(_mm256_srai_epi16::<1>(pairs), kept);
        // All bits of an exponent are set in a NaN.
        let first_nan = _mm256_slli_epi16::<8>(are_nan);
        let second_nan = _mm256_and_si256(are_nan, _mm256_set1_epi16(0xff00_u16.cast_signed()));
        _mm256_storeu_si256(to.cast(), _mm256_or_si256(first, first_nan));
        _mm256_storeu_si256(to.add(LANES).cast(), _mm256_or_si256(second, second_nan));
    }
}

impl Simd for Avx2 {
    type F = F;
    const TILE_ROWS: usize = 6;
    const TILE_SUMS: usize = 5;

    #[inline(always)]
    fn call<O: Op>(self, op: O) -> O::Output {
        avx2! { Self::run(op) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        avx2! { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> F {
        avx2! { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: F) {
        avx2! {
            _mm256_storeu_ps(to, x[0]);
            _mm256_storeu_ps(to.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> F {
        avx2! {[
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
        ]}
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> F {
        avx2! {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_even(self, from: *const u16) -> F {
        avx2! {
            let low = _mm256_loadu_si256(from.cast());
            let high = _mm256_loadu_si256(from.add(LANES).cast());
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_odd(self, from: *const u16) -> F {
        let from = distinct_address(from);
        avx2! {
            let mask = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000_u32 as i32));
            [
                _mm256_and_ps(_mm256_loadu_ps(from.cast()), mask),
                _mm256_and_ps(_mm256_loadu_ps(from.add(LANES).cast()), mask),
            ]
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        let (even, odd) =
            (self.splat(f32::from_bits(pair << 16)), self.splat(f32::from_bits(pair & 0xffff_0000)));
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `weights`.
        let (w_even, w_odd) = unsafe { (self.load_bf16_even(weights), self.load_bf16_odd(weights)) };
        self.fma(w_even, even, self.fma(w_odd, odd, sum))
    }

    type I = [__m256i; 2];
    /// Two inputs: bytes are widened to sixteen bits, because the instruction that multiplies bytes saturates.
    const DOT_INPUTS: usize = 2;

    #[inline(always)]
    fn splat_i(self, x: i32) -> [__m256i; 2] {
        avx2! { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    fn floats(self, x: [__m256i; 2]) -> F {
        avx2! { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
    }
    #[inline(always)]
    fn to_i8(self, x: F) -> [i8; LANES] {
        avx2! {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
            // Packing works on each 128-bit half separately; the permutation restores the order of the lanes.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            std::mem::transmute(_mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            ))
        }
    }
    #[inline(always)]
    unsafe fn dot_u8(self, sum: [__m256i; 2], weights: *const u8, x: u32) -> [__m256i; 2] {
        avx2! {
            let x = _mm256_set1_epi32(x.cast_signed());
            let low = _mm256_cvtepu8_epi16(_mm_loadu_si128(weights.cast()));
            let high = _mm256_cvtepu8_epi16(_mm_loadu_si128(weights.add(LANES).cast()));
            [
                _mm256_add_epi32(sum[0], _mm256_madd_epi16(low, x)),
                _mm256_add_epi32(sum[1], _mm256_madd_epi16(high, x)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> [[__m256i; 2]; 2] {
        avx2! {
            let mask = _mm256_set1_epi8(15);
            let first = _mm256_loadu_si256(from.cast());
            let second = _mm256_loadu_si256(from.add(2 * LANES).cast());
            [
                [_mm256_and_si256(first, mask), _mm256_and_si256(second, mask)],
                [
                    _mm256_and_si256(_mm256_srli_epi16::<4>(first), mask),
                    _mm256_and_si256(_mm256_srli_epi16::<4>(second), mask),
                ],
            ]
        }
    }
    /// Sums of sixteen bits: eight dot products of two inputs are at most 8 * 2 * 15 * 127, which is below 2^15.
    #[inline(always)]
    fn begin_quads(self, _: [__m256i; 2]) -> [__m256i; 2] {
        avx2! { [_mm256_setzero_si256(); 2] }
    }
    #[inline(always)]
    fn dot_quads(self, part: [__m256i; 2], weights: [__m256i; 2], x: u32) -> [__m256i; 2] {
        avx2! {
            let x = _mm256_set1_epi32(x.cast_signed());
            [
                _mm256_add_epi16(part[0], _mm256_maddubs_epi16(weights[0], x)),
                _mm256_add_epi16(part[1], _mm256_maddubs_epi16(weights[1], x)),
            ]
        }
    }
    #[inline(always)]
    fn end_quads(self, sum: [__m256i; 2], part: [__m256i; 2]) -> [__m256i; 2] {
        avx2! {
            let ones = _mm256_set1_epi16(1);
            [
                _mm256_add_epi32(sum[0], _mm256_madd_epi16(part[0], ones)),
                _mm256_add_epi32(sum[1], _mm256_madd_epi16(part[1], ones)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> F {
        avx2! {[
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8).cast()))),
        ]}
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> F {
        avx2! {[
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()))),
        ]}
    }
    #[inline(always)]
    fn shift_right(self, x: [__m256i; 2], bits: u32) -> [__m256i; 2] {
        avx2! {
            let bits = _mm256_set1_epi32(bits.cast_signed());
            [_mm256_srlv_epi32(x[0], bits), _mm256_srlv_epi32(x[1], bits)]
        }
    }
    #[inline(always)]
    fn look_up(self, table: F, index: [__m256i; 2]) -> F {
        [self.look_up_half(table, index[0]), self.look_up_half(table, index[1])]
    }
    #[inline(always)]
    fn widen_i8(self, words: [__m256i; 2]) -> F {
        avx2! {[
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(words[0]))),
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(words[1]))),
        ]}
    }
    #[inline(always)]
    fn widen_e4m3(self, words: [__m256i; 2]) -> F {
        [self.widen_half_e4m3(words[0]), self.widen_half_e4m3(words[1])]
    }
    #[inline(always)]
    unsafe fn e4m3_to_bf16(self, from: *const u8, to: *mut u16) {
        // SAFETY: by the caller's contract, thirty-two bytes are readable, and thirty-two u16 are writable.
        unsafe {
            self.half_e4m3_to_bf16(from, to);
            self.half_e4m3_to_bf16(from.add(LANES), to.add(LANES));
        }
    }

    #[inline(always)]
    unsafe fn e4m3_pairs_to_f16(self, from: *const u8, to: *mut u16) {
        avx2! { e4m3_pairs_to_f16(from, to) }
    }

    #[inline(always)]
    unsafe fn load_i(self, from: *const u16) -> [__m256i; 2] {
        avx2! { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(LANES).cast())] }
    }
    #[inline(always)]
    unsafe fn dot_i16(self, sum: [__m256i; 2], weights: [__m256i; 2], pair: *const u32) -> [__m256i; 2] {
        avx2! { add_products(sum, weights, pair) }
    }
    #[inline(always)]
    fn pairs_i16(self, low: F, high: F) -> [__m256i; 2] {
        avx2! {
            let low = _mm256_packs_epi32(_mm256_cvtps_epi32(low[0]), _mm256_cvtps_epi32(low[1]));
            let high = _mm256_packs_epi32(_mm256_cvtps_epi32(high[0]), _mm256_cvtps_epi32(high[1]));
            // Packing works on each 128-bit half separately; the permutations restore the order of the lanes.
            [
                _mm256_permute4x64_epi64::<0b11_01_10_00>(low),
                _mm256_permute4x64_epi64::<0b11_01_10_00>(high),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_i(self, to: *mut u32, x: [__m256i; 2]) {
        avx2! {
            _mm256_storeu_si256(to.cast(), x[0]);
            _mm256_storeu_si256(to.add(8).cast(), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn powers(self, exponents: *const u8) -> F {
        avx2! {
            let low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(exponents.cast()));
            let high = _mm256_cvtepu8_epi32(_mm_loadl_epi64(exponents.add(8).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            ]
        }
    }

    #[inline(always)]
    fn prefetch(self, line: *const u8) {
        avx2! { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        avx2! { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        avx2! { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        avx2! { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        avx2! { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        avx2! { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        avx2! { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn less(self, a: F, b: F, x: F, y: F) -> F {
        avx2! {[
            _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
            _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
        ]}
    }
    #[inline(always)]
    fn round_to_bf16(self, a: F) -> F {
        [self.half_to_bf16(a[0]), self.half_to_bf16(a[1])]
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        avx2! { [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])] }
    }
    #[inline(always)]
    fn exp2_integer(self, n: F) -> F {
        avx2! {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvtps_epi32(n[0]), bias);
            let high = _mm256_add_epi32(_mm256_cvtps_epi32(n[1]), bias);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            ]
        }
    }
    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        fold!(a, _mm256_add_ps, _mm_add_ps)
    }
    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        fold!(a, _mm256_max_ps, _mm_max_ps)
    }
    #[inline(always)]
    fn any_nan(self, a: F) -> bool {
        avx2! { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_UNORD_Q>(a[0], a[1])) != 0 }
    }
}
