//! The portable path: plain code over arrays, for any machine and as the reference for the other paths.

use super::{LANES, Op, Simd, e4m3, from_bf16, to_bf16};

/// Every machine supports this path, so a value of this type proves nothing.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Portable;

impl Portable {
    pub(in crate::cpu) fn run<O: Op>(op: O) -> O::Output {
        op.run(Self)
    }
}

type F = [f32; LANES];

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> F {
    std::array::from_fn(f)
}

/// Reduces all lanes to one with `f`: the upper half is combined with the lower half until one lane is left.
#[inline(always)]
fn fold(mut lanes: F, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

impl Simd for Portable {
    type F = F;
    const TILE_ROWS: usize = 3;
    const TILE_SUMS: usize = 2;

    #[inline(never)]
    fn call<O: Op>(self, op: O) -> O::Output {
        op.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> F {
        // SAFETY: by the caller's contract, sixteen f32 are readable at `from`.
        unsafe { from.cast::<F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: F) {
        // SAFETY: by the caller's contract, sixteen f32 are writable at `to`.
        unsafe { to.cast::<F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> F {
        // SAFETY: by the caller's contract, sixteen u16 are readable at `from`.
        each(|i| half::f16::from_bits(unsafe { *from.add(i) }).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> F {
        // SAFETY: by the caller's contract, sixteen u16 are readable at `from`.
        each(|i| from_bf16(unsafe { *from.add(i) }))
    }
    #[inline(always)]
    unsafe fn load_bf16_even(self, from: *const u16) -> F {
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `from`.
        each(|i| from_bf16(unsafe { *from.add(2 * i) }))
    }
    #[inline(always)]
    unsafe fn load_bf16_odd(self, from: *const u16) -> F {
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `from`.
        each(|i| from_bf16(unsafe { *from.add(2 * i + 1) }))
    }
    #[inline(always)]
    unsafe fn dot_bf16(self, sum: F, weights: *const u16, pair: u32) -> F {
        let (even, odd) = (from_bf16(pair as u16), from_bf16((pair >> 16) as u16));
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `weights`.
        let (w_even, w_odd) = unsafe { (self.load_bf16_even(weights), self.load_bf16_odd(weights)) };
        self.fma(w_even, self.splat(even), self.fma(w_odd, self.splat(odd), sum))
    }

    type I = [i32; LANES];
    /// Equals the number of the paths that multiply bytes, so that tests on any machine cover the layout of those
    /// paths.
    const DOT_INPUTS: usize = 4;

    #[inline(always)]
    fn splat_i(self, x: i32) -> [i32; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    fn floats(self, x: [i32; LANES]) -> F {
        each(|i| x[i] as f32)
    }
    #[inline(always)]
    fn to_i8(self, x: F) -> [i8; LANES] {
        self.round(x).map(|x| x as i8)
    }
    #[inline(always)]
    unsafe fn dot_u8(self, sum: [i32; LANES], weights: *const u8, x: u32) -> [i32; LANES] {
        let x = x.to_le_bytes().map(|x| i32::from(x.cast_signed()));
        std::array::from_fn(|lane| {
            // SAFETY: by the caller's contract, `4 * LANES` bytes are readable at `weights`.
            let weight = |i: usize| i32::from(unsafe { *weights.add(4 * lane + i) });
            sum[lane] + weight(0) * x[0] + weight(1) * x[1] + weight(2) * x[2] + weight(3) * x[3]
        })
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8) -> [[i32; LANES]; 2] {
        // SAFETY: by the caller's contract, sixty-four bytes are readable at `from`.
        let words = unsafe { from.cast::<[i32; LANES]>().read_unaligned() };
        [words.map(|word| word & 0x0f0f_0f0f), words.map(|word| word >> 4 & 0x0f0f_0f0f)]
    }
    #[inline(always)]
    fn begin_quads(self, sum: [i32; LANES]) -> [i32; LANES] {
        sum
    }
    #[inline(always)]
    fn dot_quads(self, part: [i32; LANES], weights: [i32; LANES], x: u32) -> [i32; LANES] {
        let x = x.to_le_bytes().map(|x| i32::from(x.cast_signed()));
        std::array::from_fn(|lane| {
            let weight = |i: i32| weights[lane] >> (8 * i) & 15;
            part[lane] + weight(0) * x[0] + weight(1) * x[1] + weight(2) * x[2] + weight(3) * x[3]
        })
    }
    #[inline(always)]
    fn end_quads(self, _: [i32; LANES], part: [i32; LANES]) -> [i32; LANES] {
        part
    }
    #[inline(always)]
    unsafe fn load_u8(self, from: *const u8) -> F {
        // SAFETY: by the caller's contract, sixteen bytes are readable at `from`.
        each(|i| f32::from(unsafe { *from.add(i) }))
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> F {
        // SAFETY: by the caller's contract, sixteen bytes are readable at `from`.
        each(|i| f32::from(unsafe { *from.add(i) }.cast_signed()))
    }
    #[inline(always)]
    fn shift_right(self, x: [i32; LANES], bits: u32) -> [i32; LANES] {
        x.map(|x| (x.cast_unsigned() >> bits).cast_signed())
    }
    #[inline(always)]
    fn look_up(self, table: F, index: [i32; LANES]) -> F {
        each(|i| table[index[i] as usize & 15])
    }
    #[inline(always)]
    fn widen_i8(self, words: [i32; LANES]) -> F {
        each(|i| f32::from(words[i] as i8))
    }
    #[inline(always)]
    fn widen_e4m3(self, words: [i32; LANES]) -> F {
        each(|i| e4m3(words[i] as u8))
    }
    #[inline(always)]
    unsafe fn e4m3_to_bf16(self, from: *const u8, to: *mut u16) {
        for lane in 0..2 * LANES {
            // SAFETY: by the caller's contract, thirty-two bytes are readable, and thirty-two u16 are writable.
            unsafe {
                let code = *from.add(lane);
                let number = (e4m3(code).to_bits() >> 16) as u16;
                *to.add(lane) = if code & 0x7f == 0x7f { u16::MAX } else { number };
            }
        }
    }

    #[inline(always)]
    unsafe fn e4m3_pairs_to_f16(self, from: *const u8, to: *mut u16) {
        for index in 0..2 * LANES {
            // SAFETY: by the caller's contract, thirty-two bytes are readable, and thirty-two u16 are writable.
            unsafe {
                let code = u16::from(*from.add(2 * (index % LANES) + index / LANES));
                let number = (code & 0x80) << 8 | (code & 0x7f) << 7;
                *to.add(index) = if code & 0x7f == 0x7f { u16::MAX } else { number };
            }
        }
    }

    #[inline(always)]
    unsafe fn load_i(self, from: *const u16) -> [i32; LANES] {
        // SAFETY: by the caller's contract, thirty-two u16 are readable at `from`.
        unsafe { from.cast::<[i32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn dot_i16(self, sum: [i32; LANES], weights: [i32; LANES], pair: *const u32) -> [i32; LANES] {
        let halves = |x: i32| (i32::from(x as i16), x >> 16);
        // SAFETY: by the caller's contract, `pair` is readable.
        let (even, odd) = halves(unsafe { *pair }.cast_signed());
        std::array::from_fn(|lane| {
            let (w_even, w_odd) = halves(weights[lane]);
            sum[lane].wrapping_add(w_even * even).wrapping_add(w_odd * odd)
        })
    }
    #[inline(always)]
    fn pairs_i16(self, low: F, high: F) -> [i32; LANES] {
        let mut words = [0; LANES];
        for (words, x) in words.as_chunks_mut::<{ LANES / 2 }>().0.iter_mut().zip([low, high]) {
            let numbers = self.round(x).map(|x| u32::from((x as i16).cast_unsigned()));
            for (word, pair) in words.iter_mut().zip(numbers.as_chunks::<2>().0) {
                *word = (pair[0] | pair[1] << 16).cast_signed();
            }
        }
        words
    }
    #[inline(always)]
    unsafe fn store_i(self, to: *mut u32, x: [i32; LANES]) {
        // SAFETY: by the caller's contract, sixteen words are writable at `to`.
        unsafe { to.cast::<[i32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn powers(self, exponents: *const u8) -> F {
        // SAFETY: by the caller's contract, sixteen bytes are readable at `exponents`.
        each(|i| f32::from_bits(u32::from(unsafe { *exponents.add(i) }) << 23))
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        // Without a fused instruction, `mul_add` is a call to the maths library for every lane.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            each(|i| a[i].mul_add(b[i], c[i]))
        } else {
            each(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn fma_on_all_paths(self, a: F, b: F, c: F) -> F {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn less(self, a: F, b: F, x: F, y: F) -> F {
        each(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn round_to_bf16(self, a: F) -> F {
        each(|i| from_bf16(to_bf16(a[i])))
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        // Adding and subtracting 1.5 * 2^23 rounds magnitudes below 2^22 to the nearest integer, ties to even. Callers
        // pass a larger magnitude only if it is an integer.
        const MAGIC: f32 = 12_582_912.0;
        each(|i| if a[i].abs() < 4_194_304.0 { (a[i] + MAGIC) - MAGIC } else { a[i] })
    }
    #[inline(always)]
    fn exp2_integer(self, n: F) -> F {
        each(|i| f32::from_bits(((n[i] as i32).wrapping_add(127) as u32) << 23))
    }
    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        fold(a, |x, y| x + y)
    }
    #[inline(always)]
    fn largest(self, a: F) -> f32 {
        fold(a, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    fn any_nan(self, a: F) -> bool {
        a.iter().any(|x| x.is_nan())
    }
}
