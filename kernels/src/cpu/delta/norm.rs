//! The norm of each head of a delta rule's output, gated by SiLU.

use crate::cpu::rowwise::{rms_factor, silu};
use crate::cpu::simd::{LANES, Op, Simd};

/// Computes `x = norm(x) * silu(gate)`, head by head.
pub(in crate::cpu) struct GatedNorm<'a> {
    /// The elements of one token, head by head.
    pub(in crate::cpu) x: &'a mut [f32],
    /// One gate per element of `x`.
    pub(in crate::cpu) gate: &'a [f32],
    /// Weights of the norm: one per element of a head.
    pub(in crate::cpu) weight: &'a [f32],
    pub(in crate::cpu) eps: f32,
}

impl Op for GatedNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        for (x, gate) in self.x.chunks_exact_mut(width).zip(self.gate.chunks_exact(width)) {
            let factor = s.splat(rms_factor(s, x, self.eps));
            for ((x, gate), weight) in
                x.chunks_mut(LANES).zip(gate.chunks(LANES)).zip(self.weight.chunks(LANES))
            {
                let normal = s.mul(s.mul(s.load_some(x, 0.0), factor), s.load_some(weight, 0.0));
                s.store_some(x, s.mul(normal, silu(s, s.load_some(gate, 0.0))));
            }
        }
    }
}
