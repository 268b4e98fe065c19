//! Operations on single rows: layer norm, GELU and rotation.

use crate::Gelu;
use crate::cpu::simd::{LANES, Op, Simd, exp};

/// The layer norm of one row. The mean and the variance are summed over blocks of sixteen elements, then over lanes.
pub(in crate::cpu) struct LayerNorm<'a> {
    pub(in crate::cpu) x: &'a [f32],
    pub(in crate::cpu) weight: &'a [f32],
    pub(in crate::cpu) bias: &'a [f32],
    pub(in crate::cpu) eps: f32,
    pub(in crate::cpu) out: &'a mut [f32],
}

impl Op for LayerNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, weight, bias, eps, out } = self;
        let mut sum = s.splat(0.0);
        for block in x.chunks(LANES) {
            sum = s.add(sum, s.load_some(block, 0.0));
        }
        let mean = s.sum(sum) / x.len() as f32;
        let centre = s.splat(mean);
        let mut squares = s.splat(0.0);
        for block in x.chunks(LANES) {
            // Lanes beyond the row are the mean, so that they add nothing.
            let off = s.sub(s.load_some(block, mean), centre);
            squares = s.fma(off, off, squares);
        }
        let factor = s.splat(1.0 / (s.sum(squares) / x.len() as f32 + eps).sqrt());
        let blocks = x.chunks(LANES).zip(weight.chunks(LANES)).zip(bias.chunks(LANES));
        for (((x, weight), bias), out) in blocks.zip(out.chunks_mut(LANES)) {
            let normal = s.mul(s.sub(s.load_some(x, 0.0), centre), factor);
            s.store_some(out, s.fma(normal, s.load_some(weight, 0.0), s.load_some(bias, 0.0)));
        }
    }
}

/// Applies a GELU to all elements.
pub(in crate::cpu) struct ApplyGelu<'a> {
    pub(in crate::cpu) form: Gelu,
    pub(in crate::cpu) x: &'a mut [f32],
}

impl Op for ApplyGelu<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.form {
            Gelu::Exact => {
                for x in self.x.chunks_mut(LANES) {
                    let value = s.load_some(x, 0.0);
                    let half = s.mul(value, s.splat(0.5));
                    let share = erf(s, s.mul(value, s.splat(std::f32::consts::FRAC_1_SQRT_2)));
                    s.store_some(x, s.fma(half, share, half));
                }
            }
            Gelu::Tanh => {
                for x in self.x.chunks_mut(LANES) {
                    let value = s.load_some(x, 0.0);
                    s.store_some(x, gelu_tanh(s, value));
                }
            }
        }
    }
}

/// Returns `x * (1 + tanh(u)) / 2`, which is `x / (1 + e^(-2u))`.
#[inline(always)]
fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    /// `-2 * sqrt(2 / pi)`.
    const SLOPE: f32 = -1.595_769;
    let cubic = s.fma(s.mul(x, x), s.splat(0.044_715), s.splat(1.0));
    let decay = exp(s, s.mul(s.mul(x, cubic), s.splat(SLOPE)));
    s.div(x, s.add(s.splat(1.0), decay))
}

/// Returns the error function, with an error of at most 5e-7: a rational approximation whose coefficients are those of
/// Eigen and XLA. The function is 1 up to the last bit beyond 4.
#[inline(always)]
fn erf<S: Simd>(s: S, x: S::F) -> S::F {
    const ABOVE: [f32; 7] = [
        -2.726_142_3e-10,
        2.770_681_5e-8,
        -2.101_024_1e-6,
        -5.692_506_4e-5,
        -7.349_906e-4,
        -2.954_6e-3,
        -1.609_603_3e-2,
    ];
    const BELOW: [f32; 5] = [-1.456_607_1e-5, -2.133_740_6e-4, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2];
    // `max` and `less` pass a NaN in `x` through.
    let x = s.max(s.splat(-4.0), x);
    let x = s.less(s.splat(4.0), x, s.splat(4.0), x);
    let square = s.mul(x, x);
    s.div(s.mul(x, polynomial(s, &ABOVE, square)), polynomial(s, &BELOW, square))
}

/// Returns the polynomial with these coefficients, the highest power first.
#[inline(always)]
fn polynomial<S: Simd>(s: S, coefficients: &[f32], x: S::F) -> S::F {
    let mut sum = s.splat(coefficients[0]);
    for &coefficient in &coefficients[1..] {
        sum = s.fma(sum, x, s.splat(coefficient));
    }
    sum
}

/// Rotates the first heads of one row. `angles` holds the cosines and then the sines of half a head.
pub(in crate::cpu) fn rotate(heads: &mut [f32], head_dim: usize, angles: &[f32]) {
    let half = head_dim / 2;
    let (cosines, sines) = angles.split_at(half);
    for head in heads.chunks_exact_mut(head_dim) {
        let (low, high) = head.split_at_mut(half);
        for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
            (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
        }
    }
}
