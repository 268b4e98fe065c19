//! The AVX-512 paths, which keep each value in one 512-bit register. [`Avx512`] has no dot-product instructions.
//! [`Avx512Vnni`] has dot products of integers, and [`Avx512Bf16`] has dot products of bfloat16.

use std::arch::{asm, x86_64::*};

use super::{E4M3_BF16_BIAS, E4M3_BF16_SUBNORMAL, E4M3_BIAS, E4M3_LEAST, LANES, Op, Simd};

type F = __m512;

/// Proof that the machine has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512(());

/// Proof that the machine has all instructions of [`Avx512`], and AVX512_VNNI.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512Vnni(());

/// Proof that the machine has all instructions of [`Avx512`], and AVX512_BF16.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512Bf16(());

impl Avx512 {
    /// # Safety
    ///
    /// The machine has AVX2, FMA, F16C and AVX-512 F, BW, DQ and VL.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(in crate::cpu) unsafe fn run<O: Op>(op: O) -> O::Output {
        op.run(Self(()))
    }
}

impl Avx512Vnni {
    /// # Safety
    ///
    /// The machine has AVX2, FMA, F16C, AVX-512 F, BW, DQ and VL, and AVX512_VNNI.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(in crate::cpu) unsafe fn run<O: Op>(op: O) -> O::Output {
        op.run(Self(()))
    }
}

impl Avx512Bf16 {
    /// # Safety
    ///
    /// The machine has AVX2, FMA, F16C, AVX-512 F, BW, DQ and VL, and AVX512_BF16.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(in crate::cpu) unsafe fn run<O: Op>(op: O) -> O::Output {
        op.run(Self(()))
    }
}

/// Wraps calls of intrinsics in `unsafe`. Use it only where a value of a proof type such as [`Avx512`] is in scope, or
/// in a function whose safety contract demands the instructions. A value of a proof type exists only on a machine that
/// has the instructions.
macro_rules! avx512 {
    ($($body:tt)*) => {{
        // SAFETY: a proof value in scope or the function's safety contract guarantees the instructions. By the caller's
        // contract, all accessed memory is valid.
        unsafe { $($body)* }
    }};
}

/// Reduces all lanes to one with `op`: the upper half is combined with the lower half until one lane is left.
macro_rules! fold {
    ($a:expr, $op256:ident, $op128:ident) => {
        avx512! {{
            let a = $op256(_mm512_castps512_ps256($a), _mm512_extractf32x8_ps::<1>($a));
            let a = $op128(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = $op128(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32($op128(a, _mm_movehdup_ps(a)))
        }}
    };
}

/// Returns the even and the odd bfloat16 of a pair as f32.
#[inline(always)]
fn halves(pair: u32) -> (f32, f32) {
    (f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000))
}

/// One step of a bfloat16 dot product, without the dot-product instruction.
///
/// # Safety
///
/// Thirty-two u16 are readable at `weights`.
#[inline(always)]
unsafe fn dot_widened<S: Simd>(s: S, sum: S::F, weights: *const u16, pair: u32) -> S::F {
    let (even, odd) = halves(pair);
    // SAFETY: by the caller's contract, thirty-two u16 are readable at `weights`.
    let (w_even, w_odd) = unsafe { (s.load_bf16_even(weights), s.load_bf16_odd(weights)) };
    s.fma(w_even, s.splat(even), s.fma(w_odd, s.splat(odd), sum))
}

/// Returns `sum` plus the products of pairs of i16. This is assembly, because the compiler splits the intrinsic into a
/// multiplication and an addition.
///
/// # Safety
///
/// The machine has AVX512_VNNI.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_products(mut sum: __m512i, weights: __m512i, pair: __m512i) -> __m512i {
    // SAFETY: by the caller's contract, the machine has AVX512_VNNI.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {weights}, {pair}",
            sum = inout(zmm_reg) sum,
            weights = in(zmm_reg) weights,
            pair = in(zmm_reg) pair,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// One step of a dot product of bytes that are widened to sixteen bits.
///
/// # Safety
///
/// The machine has AVX-512 F and BW, and 32 bytes are readable at `weights`.
#[inline(always)]
unsafe fn dot_words(sum: __m512i, weights: *const u8, x: u32) -> __m512i {
    avx512! {
        let weights = _mm512_cvtepu8_epi16(_mm256_loadu_si256(weights.cast()));
        _mm512_add_epi32(sum, _mm512_madd_epi16(weights, _mm512_set1_epi32(x.cast_signed())))
    }
}

/// [`Simd::dot_quads`] with sums of sixteen bits: eight dot products of two inputs are at most 8 * 2 * 15 * 127, which
/// is below 2^15.
///
/// # Safety
///
/// The machine has AVX-512 F and BW.
#[inline(always)]
unsafe fn dot_quads_in_words(part: __m512i, weights: __m512i, x: u32) -> __m512i {
    avx512! {
        let x = _mm512_set1_epi32(x.cast_signed());
        _mm512_add_epi16(part, _mm512_maddubs_epi16(weights, x))
    }
}

/// [`Simd::store_transposed`]: transposes sixteen rows of sixteen words in registers. Rows after the first `R` are
/// zeros.
///
/// # Safety
///
/// The machine has AVX-512 F, and `16 * R` words are writable at `to`.
#[inline(always)]
unsafe fn store_transposed<const R: usize>(rows: &[__m512i; R], to: *mut u32) {
    const { assert!(R <= LANES) };
    avx512! {
        let mut a = [_mm512_setzero_si512(); LANES];
        a[..R].copy_from_slice(rows);
        let mut b = a;
        for i in 0..8 {
            b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        for i in 0..4 {
            a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
            a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
            a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
            a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
        }
        for j in 0..4 {
            let even = [
                _mm512_shuffle_i32x4::<0x88>(a[j], a[4 + j]),
                _mm512_shuffle_i32x4::<0x88>(a[8 + j], a[12 + j]),
            ];
            let odd = [
                _mm512_shuffle_i32x4::<0xdd>(a[j], a[4 + j]),
                _mm512_shuffle_i32x4::<0xdd>(a[8 + j], a[12 + j]),
            ];
            b[j] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
            b[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
            b[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even[0], even[1]);
            b[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd[0], odd[1]);
        }
        for (lane, words) in b.into_iter().enumerate() {
            // A whole register is stored where later stores overwrite the words after the first `R`.
            if (lane * R + LANES) <= LANES * R {
                _mm512_storeu_si512(to.add(lane * R).cast(), words);
            } else {
                _mm512_mask_storeu_epi32(to.add(lane * R).cast(), ((1u32 << R) - 1) as u16, words);
            }
        }
    }
}

/// Implements [`Simd`] for a proof type. `$dots` are the items that differ between the proof types.
macro_rules! simd {
    ($proof:ident: $($dots:item)*) => {
        impl Simd for $proof {
            type F = F;

            #[inline(always)]
            fn call<O: Op>(self, op: O) -> O::Output {
                avx512! { Self::run(op) }
            }

            $($dots)*

            type I = __m512i;
            #[inline(always)]
            fn splat_i(self, x: i32) -> __m512i {
                avx512! { _mm512_set1_epi32(x) }
            }
            #[inline(always)]
            fn floats(self, x: __m512i) -> F {
                avx512! { _mm512_cvtepi32_ps(x) }
            }
            #[inline(always)]
            fn to_i8(self, x: F) -> [i8; LANES] {
                avx512! { std::mem::transmute(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))) }
            }

            #[inline(always)]
            fn quads_i8(self, x: [F; 4]) -> __m512i {
                avx512! {
                    let first = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x[0]));
                    let words = _mm512_castsi128_si512(first);
                    let words = _mm512_inserti32x4::<1>(words, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x[1])));
                    let words = _mm512_inserti32x4::<2>(words, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x[2])));
                    _mm512_inserti32x4::<3>(words, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x[3])))
                }
            }

            #[inline(always)]
            unsafe fn load_nibbles(self, from: *const u8) -> [__m512i; 2] {
                avx512! {
                    let (bytes, mask) = (_mm512_loadu_si512(from.cast()), _mm512_set1_epi8(15));
                    let high = _mm512_srli_epi16::<4>(bytes);
                    [_mm512_and_si512(bytes, mask), _mm512_and_si512(high, mask)]
                }
            }
            #[inline(always)]
            unsafe fn load_u8(self, from: *const u8) -> F {
                avx512! { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
            }
            #[inline(always)]
            unsafe fn load_i8(self, from: *const u8) -> F {
                avx512! { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
            }
            #[inline(always)]
            fn shift_right(self, x: __m512i, bits: u32) -> __m512i {
                avx512! { _mm512_srlv_epi32(x, _mm512_set1_epi32(bits.cast_signed())) }
            }
            #[inline(always)]
            fn look_up(self, table: F, index: __m512i) -> F {
                avx512! { _mm512_permutexvar_ps(index, table) }
            }
            #[inline(always)]
            fn widen_i8(self, words: __m512i) -> F {
                avx512! { _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(words))) }
            }
            #[inline(always)]
            fn widen_e4m3(self, words: __m512i) -> F {
                avx512! {
                    let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(words, _mm512_set1_epi32(0x80)));
                    let number = _mm512_slli_epi32::<20>(_mm512_and_si512(words, _mm512_set1_epi32(0x7f)));
                    let biased = _mm512_add_epi32(number, _mm512_set1_epi32(E4M3_BIAS));
                    let normal = _mm512_castsi512_ps(biased);
                    let least = _mm512_set1_ps(E4M3_LEAST);
                    let subnormal = _mm512_fmsub_ps(normal, _mm512_set1_ps(2.0), least);
                    let magnitude = _mm512_castps_si512(_mm512_min_ps(normal, subnormal));
                    _mm512_castsi512_ps(_mm512_or_si512(sign, magnitude))
                }
            }
            #[inline(always)]
            unsafe fn e4m3_to_bf16(self, from: *const u8, to: *mut u16) {
                avx512! {
                    let codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.cast()));
                    let magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
                    let sign = _mm512_slli_epi16::<8>(_mm512_xor_si512(codes, magnitude));
                    let bits = _mm512_slli_epi16::<4>(magnitude);
                    let normal = _mm512_add_epi16(bits, _mm512_set1_epi16(E4M3_BF16_BIAS));
                    let table = _mm512_broadcast_i32x4(_mm_loadu_si128(E4M3_BF16_SUBNORMAL.as_ptr().cast()));
                    let is_small = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
                    let number = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, table);
                    let is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f));
                    let number = _mm512_mask_set1_epi16(number, is_nan, -1);
                    _mm512_storeu_si512(to.cast(), _mm512_or_si512(number, sign));
                }
            }

            #[inline(always)]
            unsafe fn e4m3_pairs_to_f16(self, from: *const u8, to: *mut u16) {
                avx512! { super::avx2::e4m3_pairs_to_f16(from, to) }
            }

            #[inline(always)]
            unsafe fn load_i(self, from: *const u16) -> __m512i {
                avx512! { _mm512_loadu_si512(from.cast()) }
            }
            #[inline(always)]
            fn pairs_i16(self, low: F, high: F) -> __m512i {
                avx512! {
                    let low = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(low));
                    let high = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(high));
                    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
                }
            }
            #[inline(always)]
            unsafe fn store_i(self, to: *mut u32, x: __m512i) {
                avx512! { _mm512_storeu_si512(to.cast(), x) }
            }
            #[inline(always)]
            unsafe fn store_transposed<const R: usize>(self, rows: &[__m512i; R], to: *mut u32) {
                // SAFETY: `self` proves that the machine has AVX-512 F. By the caller's contract, `16 * R` words are
                // writable at `to`.
                unsafe { store_transposed(rows, to) }
            }
            #[inline(always)]
            unsafe fn powers(self, exponents: *const u8) -> F {
                avx512! {
                    let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(exponents.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<23>(bytes))
                }
            }

            #[inline(always)]
            fn splat(self, x: f32) -> F {
                avx512! { _mm512_set1_ps(x) }
            }
            #[inline(always)]
            unsafe fn load(self, from: *const f32) -> F {
                avx512! { _mm512_loadu_ps(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32, x: F) {
                avx512! { _mm512_storeu_ps(to, x) }
            }
            #[inline(always)]
            unsafe fn load_f16(self, from: *const u16) -> F {
                avx512! { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
            }
            #[inline(always)]
            unsafe fn load_bf16(self, from: *const u16) -> F {
                avx512! {
                    let raw = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(raw))
                }
            }
            #[inline(always)]
            unsafe fn load_bf16_even(self, from: *const u16) -> F {
                avx512! { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_loadu_si512(from.cast()))) }
            }
            #[inline(always)]
            unsafe fn load_bf16_odd(self, from: *const u16) -> F {
                avx512! {
                    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
                    _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from.cast()), high))
                }
            }
            #[inline(always)]
            fn prefetch(self, line: *const u8) {
                avx512! { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
            }
            #[inline(always)]
            fn prefetch_far(self, line: *const u8) {
                avx512! { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
            }
            #[inline(always)]
            fn prefetch_to_write(self, line: *const u8) {
                // SAFETY: the instruction accesses no memory, and CPUs without it do nothing.
                unsafe { asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly)) };
            }
            #[inline(always)]
            fn add(self, a: F, b: F) -> F {
                avx512! { _mm512_add_ps(a, b) }
            }
            #[inline(always)]
            fn sub(self, a: F, b: F) -> F {
                avx512! { _mm512_sub_ps(a, b) }
            }
            #[inline(always)]
            fn mul(self, a: F, b: F) -> F {
                avx512! { _mm512_mul_ps(a, b) }
            }
            #[inline(always)]
            fn div(self, a: F, b: F) -> F {
                avx512! { _mm512_div_ps(a, b) }
            }
            #[inline(always)]
            fn fma(self, a: F, b: F, c: F) -> F {
                avx512! { _mm512_fmadd_ps(a, b, c) }
            }
            #[inline(always)]
            fn max(self, a: F, b: F) -> F {
                avx512! { _mm512_max_ps(a, b) }
            }
            #[inline(always)]
            fn less(self, a: F, b: F, x: F, y: F) -> F {
                avx512! { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
            }
            #[inline(always)]
            fn round_to_bf16(self, a: F) -> F {
                avx512! {
                    let bits = _mm512_castps_si512(a);
                    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                    let up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
                    let nearest = _mm512_add_epi32(bits, up);
                    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
                    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a);
                    let rounded = _mm512_mask_blend_epi32(nan, nearest, quiet);
                    _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
                }
            }
            #[inline(always)]
            fn round(self, a: F) -> F {
                avx512! { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
            }
            #[inline(always)]
            fn exp2_integer(self, n: F) -> F {
                avx512! {
                    let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
                }
            }
            #[inline(always)]
            fn scale_by_exp2(self, p: F, n: F, x: F) -> F {
                avx512! {
                    let seen = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
                    _mm512_maskz_scalef_ps(seen, p, n)
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
                avx512! { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a) != 0 }
            }
        }
    };
}

simd! { Avx512:
    const TILE_ROWS: usize = 12;
    const TILE_SUMS: usize = 24;
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `weights`.
        unsafe { dot_widened(self, sum, weights, pair) }
    }
    #[inline(always)]
    fn begin_quads(self, _: __m512i) -> __m512i {
        avx512! { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn dot_quads(self, part: __m512i, weights: __m512i, x: u32) -> __m512i {
        // SAFETY: `self` proves that the machine has AVX-512 F and BW.
        unsafe { dot_quads_in_words(part, weights, x) }
    }
    #[inline(always)]
    fn end_quads(self, sum: __m512i, part: __m512i) -> __m512i {
        avx512! { _mm512_add_epi32(sum, _mm512_madd_epi16(part, _mm512_set1_epi16(1))) }
    }
    const DOT_INPUTS: usize = 2;
    #[inline(always)]
    unsafe fn dot_u8(self, sum: __m512i, weights: *const u8, x: u32) -> __m512i {
        // SAFETY: `self` proves that the machine has AVX-512 F and BW. By the caller's contract, 32 bytes are readable
        // at `weights`.
        unsafe { dot_words(sum, weights, x) }
    }
    #[inline(always)]
    unsafe fn dot_i16(self, sum: __m512i, weights: __m512i, pair: *const u32) -> __m512i {
        avx512! {
            _mm512_add_epi32(sum, _mm512_madd_epi16(weights, _mm512_set1_epi32((*pair).cast_signed())))
        }
    }
}

simd! { Avx512Vnni:
    const TILE_ROWS: usize = 14;
    const TILE_SUMS: usize = 28;
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `weights`.
        unsafe { dot_widened(self, sum, weights, pair) }
    }
    #[inline(always)]
    fn begin_quads(self, sum: __m512i) -> __m512i {
        sum
    }
    #[inline(always)]
    fn dot_quads(self, part: __m512i, weights: __m512i, x: u32) -> __m512i {
        avx512! { _mm512_dpbusd_epi32(part, weights, _mm512_set1_epi32(x.cast_signed())) }
    }
    #[inline(always)]
    fn end_quads(self, _: __m512i, part: __m512i) -> __m512i {
        part
    }
    const DOT_INPUTS: usize = 4;
    #[inline(always)]
    unsafe fn dot_u8(self, sum: __m512i, weights: *const u8, x: u32) -> __m512i {
        avx512! {
            _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(weights.cast()), _mm512_set1_epi32(x.cast_signed()))
        }
    }
    #[inline(always)]
    unsafe fn dot_i16(self, sum: __m512i, weights: __m512i, pair: *const u32) -> __m512i {
        // SAFETY: by the caller's contract, `pair` is readable.
        let pair = unsafe { *pair };
        avx512! { add_products(sum, weights, _mm512_set1_epi32(pair.cast_signed())) }
    }
}

simd! { Avx512Bf16:
    const TILE_ROWS: usize = 12;
    // A single tile of sixteen rows is faster than two tiles of eight, because each tile reads all weights. Loops
    // without bfloat16 dot products need more registers, and become slower with so many rows.
    const SINGLE_TILE_ROWS: usize = 16;
    const TILE_SUMS: usize = 24;
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        avx512! {
            let weights: __m512bh = std::mem::transmute(_mm512_loadu_si512(weights.cast()));
            let pair: __m512bh = std::mem::transmute(_mm512_set1_epi32(pair.cast_signed()));
            _mm512_dpbf16_ps(sum, weights, pair)
        }
    }
    #[inline(always)]
    unsafe fn dot_bf16_masked(self, sum: F, weights: *const u16, pair: u32, mask: u32) -> F {
        avx512! {
            let weights = _mm512_loadu_si512(weights.cast());
            let kept = _mm512_and_si512(weights, _mm512_set1_epi32(mask.cast_signed()));
            let pair: __m512bh = std::mem::transmute(_mm512_set1_epi32(pair.cast_signed()));
            _mm512_dpbf16_ps(sum, std::mem::transmute::<__m512i, __m512bh>(kept), pair)
        }
    }
    #[inline(always)]
    fn pairs_bf16(self, low: F, high: F) -> __m512i {
        avx512! { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) }
    }
    #[inline(always)]
    fn begin_quads(self, _: __m512i) -> __m512i {
        avx512! { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn dot_quads(self, part: __m512i, weights: __m512i, x: u32) -> __m512i {
        // SAFETY: `self` proves that the machine has AVX-512 F and BW.
        unsafe { dot_quads_in_words(part, weights, x) }
    }
    #[inline(always)]
    fn end_quads(self, sum: __m512i, part: __m512i) -> __m512i {
        avx512! { _mm512_add_epi32(sum, _mm512_madd_epi16(part, _mm512_set1_epi16(1))) }
    }
    const DOT_INPUTS: usize = 2;
    #[inline(always)]
    unsafe fn dot_u8(self, sum: __m512i, weights: *const u8, x: u32) -> __m512i {
        // SAFETY: `self` proves that the machine has AVX-512 F and BW. By the caller's contract, 32 bytes are readable
        // at `weights`.
        unsafe { dot_words(sum, weights, x) }
    }
    #[inline(always)]
    unsafe fn dot_i16(self, sum: __m512i, weights: __m512i, pair: *const u32) -> __m512i {
        avx512! {
            _mm512_add_epi32(sum, _mm512_madd_epi16(weights, _mm512_set1_epi32((*pair).cast_signed())))
        }
    }
}
