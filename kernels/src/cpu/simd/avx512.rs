//! One 512-bit register as one block, without dot products, with those of bytes, and with those of bfloat16.

use std::arch::x86_64::*;

use super::{LANES, Op, Simd};

type F = __m512;

/// Proof that the machine has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(());

/// Proof that the machine has all of [`Avx512`] and AVX512_VNNI.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512Vnni(());

/// Proof that the machine has all of [`Avx512`] and AVX512_BF16.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512Bf16(());

impl Avx512 {
    /// # Safety
    ///
    /// The machine has AVX2, FMA, F16C and AVX-512 F, BW, DQ and VL.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(in super::super) unsafe fn run<O: Op>(op: O) -> O::Output {
        op.run(Self(()))
    }
}

impl Avx512Vnni {
    /// # Safety
    ///
    /// The machine has AVX2, FMA, F16C, AVX-512 F, BW, DQ and VL, and AVX512_VNNI.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(in super::super) unsafe fn run<O: Op>(op: O) -> O::Output {
        op.run(Self(()))
    }
}

impl Avx512Bf16 {
    /// # Safety
    ///
    /// The machine has AVX2, FMA, F16C, AVX-512 F, BW, DQ and VL, and AVX512_BF16.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(in super::super) unsafe fn run<O: Op>(op: O) -> O::Output {
        op.run(Self(()))
    }
}

/// An expression of intrinsics, which `self` proves the machine to have.
macro_rules! avx512 {
    ($($body:tt)*) => {{
        // SAFETY: the proof types exist only where their instructions do; memory access is the caller's contract.
        unsafe { $($body)* }
    }};
}

/// The lanes' `op`, halves onto each other.
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

/// The even and the odd half of a pair, widened.
#[inline(always)]
fn halves(pair: u32) -> (f32, f32) {
    (f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000))
}

/// One step of a bfloat16 dot product by other means.
///
/// # Safety
///
/// As of [`Simd::dot_bf16`].
#[inline(always)]
unsafe fn dot_widened<S: Simd>(s: S, sum: S::F, weights: *const u16, pair: u32) -> S::F {
    let (even, odd) = halves(pair);
    // SAFETY: the caller's contract.
    let (w_even, w_odd) = unsafe { (s.load_bf16_even(weights), s.load_bf16_odd(weights)) };
    s.fma(w_even, s.splat(even), s.fma(w_odd, s.splat(odd), sum))
}

/// One step of a dot product of bytes, widened to sixteen bits.
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

/// All of [`Simd`] that the proofs share; `$dots` are the items that they differ in.
macro_rules! simd {
    ($proof:ident: $($dots:item)*) => {
        impl Simd for $proof {
            type F = F;
            const ACCUMULATORS: usize = 12;

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
            unsafe fn load_i(self, from: *const u16) -> __m512i {
                avx512! { _mm512_loadu_si512(from.cast()) }
            }
            #[inline(always)]
            fn to_pairs(self, x: F) -> [u32; LANES / 2] {
                avx512! { std::mem::transmute(_mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x))) }
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
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        // SAFETY: the caller's contract.
        unsafe { dot_widened(self, sum, weights, pair) }
    }
    const DOT_INPUTS: usize = 2;
    #[inline(always)]
    unsafe fn dot_u8(self, sum: __m512i, weights: *const u8, x: u32) -> __m512i {
        // SAFETY: the proof, and the caller's contract.
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
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        // SAFETY: the caller's contract.
        unsafe { dot_widened(self, sum, weights, pair) }
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
        avx512! { _mm512_dpwssd_epi32(sum, weights, _mm512_set1_epi32((*pair).cast_signed())) }
    }
}

simd! { Avx512Bf16:
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        avx512! {
            let weights: __m512bh = std::mem::transmute(_mm512_loadu_si512(weights.cast()));
            let pair: __m512bh = std::mem::transmute(_mm512_set1_epi32(pair as i32));
            _mm512_dpbf16_ps(sum, weights, pair)
        }
    }
    const DOT_INPUTS: usize = 2;
    #[inline(always)]
    unsafe fn dot_u8(self, sum: __m512i, weights: *const u8, x: u32) -> __m512i {
        // SAFETY: the proof, and the caller's contract.
        unsafe { dot_words(sum, weights, x) }
    }
    #[inline(always)]
    unsafe fn dot_i16(self, sum: __m512i, weights: __m512i, pair: *const u32) -> __m512i {
        avx512! {
            _mm512_add_epi32(sum, _mm512_madd_epi16(weights, _mm512_set1_epi32((*pair).cast_signed())))
        }
    }
}
