//! Norm and rotation of heads whose last elements are rotated in adjacent pairs.

use crate::DeviceError;
use crate::cpu::rowwise::{each_row, rms_factor};
use crate::cpu::simd::isa::Path;
use crate::cpu::simd::{LANES, Op, Simd};
use crate::cpu::threads::pool::ThreadPool;

/// The norm of each head.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum TailsNorm<'a> {
    None,
    Unweighted(f32),
    Weighted(&'a [f32], f32),
}

/// The operands of [`rotate_tails`].
pub(in crate::cpu) struct Tails<'a> {
    /// `[tokens, heads * head_dim]`.
    pub(in crate::cpu) x: &'a mut [f32],
    /// Number of heads of a token.
    pub(in crate::cpu) heads: usize,
    pub(in crate::cpu) head_dim: usize,
    pub(in crate::cpu) norm: TailsNorm<'a>,
    /// `[tokens, rotated]`: cosines and then sines.
    pub(in crate::cpu) angles: &'a [f32],
    /// Number of rotated elements of a head.
    pub(in crate::cpu) rotated: usize,
    /// True to rotate by the negative angles.
    pub(in crate::cpu) inverse: bool,
}

/// Normalises each head and rotates its last elements.
pub(in crate::cpu) fn rotate_tails(
    path: Path,
    pool: &mut ThreadPool,
    tails: Tails<'_>,
) -> Result<(), DeviceError> {
    let Tails { x, heads, head_dim, norm, angles, rotated, inverse } = tails;
    each_row(pool, x, head_dim, |head, x| {
        let angles = &angles[head / heads * rotated..][..rotated];
        path.run(Head { x, norm, angles, inverse });
    })
}

/// One head of one token.
struct Head<'a> {
    x: &'a mut [f32],
    norm: TailsNorm<'a>,
    angles: &'a [f32],
    inverse: bool,
}

impl Op for Head<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, norm, angles, inverse } = self;
        match norm {
            TailsNorm::None => {}
            TailsNorm::Unweighted(eps) => {
                let factor = s.splat(rms_factor(s, x, eps));
                for x in x.chunks_mut(LANES) {
                    s.store_some(x, s.mul(s.load_some(x, 0.0), factor));
                }
            }
            TailsNorm::Weighted(weight, eps) => {
                let factor = s.splat(rms_factor(s, x, eps));
                for (x, weight) in x.chunks_mut(LANES).zip(weight.chunks(LANES)) {
                    let normal = s.mul(s.load_some(x, 0.0), factor);
                    s.store_some(x, s.mul(normal, s.load_some(weight, 0.0)));
                }
            }
        }
        let first = x.len() - angles.len();
        let (cosines, sines) = angles.split_at(angles.len() / 2);
        let pairs = x[first..].as_chunks_mut::<2>().0.iter_mut();
        for (pair, (cos, sin)) in pairs.zip(cosines.iter().zip(sines)) {
            let sin = if inverse { -sin } else { *sin };
            let [a, b] = *pair;
            *pair = [a * cos - b * sin, b * cos + a * sin];
        }
    }
}
