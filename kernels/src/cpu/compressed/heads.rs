//! Dot products of keys with sixteen heads at once. The lanes of a value are heads, so that a head's sum runs over the
//! elements in order, and the softmax of sixteen heads needs no sums across lanes.

use crate::cpu::simd::{LANES, Op, Simd};

/// Number of keys whose products are computed at once, to hide the latency of additions.
const KEYS: usize = 4;

/// Lays out the queries of up to sixteen heads as `[head_dim][16]`, multiplied by `scale`. `queries` is
/// `[heads, head_dim]`. Lanes without a head are 0.
pub(super) fn lay_out(queries: &[f32], head_dim: usize, scale: f32, to: &mut [f32]) {
    if queries.len() < LANES * head_dim {
        to.fill(0.0);
    }
    for (lane, query) in queries.chunks_exact(head_dim).enumerate() {
        to.iter_mut().skip(lane).step_by(LANES).zip(query).for_each(|(to, q)| *to = q * scale);
    }
}

/// Distance in elements between the keys of a block: not a multiple of large powers of two, so that the keys' elements
/// of the same index do not share a set of the cache.
pub(super) fn key_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES) + LANES
}

/// The products of keys with sixteen heads.
pub(super) struct Products<'a> {
    /// Queries, `[head_dim][16]`.
    pub(super) queries: &'a [f32],
    /// Keys, [`key_stride`] elements apart.
    pub(super) keys: &'a [f32],
    /// Receives the products, `[keys][16]`.
    pub(super) out: &'a mut [f32],
}

impl Products<'_> {
    #[inline(always)]
    pub(super) fn run<S: Simd>(self, s: S) {
        let Self { queries, keys, out } = self;
        let stride = key_stride(queries.len() / LANES);
        let mut keys = keys.chunks(stride);
        let mut blocks = out.chunks_exact_mut(KEYS * LANES);
        for out in &mut blocks {
            let keys: [&[f32]; KEYS] = std::array::from_fn(|_| keys.next().unwrap_or_default());
            s.call(Tile { queries, keys, out });
        }
        for (out, key) in blocks.into_remainder().chunks_exact_mut(LANES).zip(keys) {
            s.call(Tile { queries, keys: [key], out });
        }
    }
}

/// The products of `K` keys with sixteen heads.
struct Tile<'a, const K: usize> {
    queries: &'a [f32],
    keys: [&'a [f32]; K],
    out: &'a mut [f32],
}

impl<const K: usize> Op for Tile<'_, K> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { queries, keys, out } = self;
        let elements = queries.len() / LANES;
        assert!(keys.iter().all(|key| key.len() >= elements), "keys shorter than queries");
        let mut sums = [s.splat(0.0); K];
        for element in 0..elements {
            // SAFETY: `queries` holds sixteen numbers per element.
            let query = unsafe { s.load(queries.as_ptr().add(element * LANES)) };
            for (sum, key) in sums.iter_mut().zip(&keys) {
                // SAFETY: each key has at least as many elements by the assertion.
                let key = unsafe { *key.get_unchecked(element) };
                *sum = s.fma(s.splat(key), query, *sum);
            }
        }
        for (out, sum) in out.chunks_exact_mut(LANES).zip(sums) {
            s.store_some(out, sum);
        }
    }
}
