//! Top-k and top-p over unnormalised probabilities, by selection instead of a full sort.
//!
//! Candidates are ordered by descending weight, and equal weights by ascending id. A histogram of the weights' leading
//! bits finds the bucket that contains the cut, and only that bucket is sorted.

/// Number of a weight's low bits that do not affect its bucket: only the exponent and three bits of the fraction do.
const SHIFT: u32 = 20;
/// Number of buckets for weights in 0 ..= 1.
const BUCKETS: usize = (0x3f80_0000 >> SHIFT) + 1;

/// Memory that truncation reuses from call to call.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    counts: Vec<usize>,
    masses: Vec<f64>,
    bucket: Vec<(f32, u32)>,
}

impl Scratch {
    /// Maximum size in bytes for a vocabulary: all candidates in one bucket, in a list that grows by doubling.
    pub(in crate::cpu) fn bytes(vocabulary: usize) -> usize {
        let buckets = BUCKETS * (size_of::<usize>() + size_of::<f64>());
        buckets + 2 * vocabulary * size_of::<(f32, u32)>()
    }
}

/// The last candidate that is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::cpu) struct Cut {
    weight: f32,
    id: u32,
}

impl Cut {
    /// True if a candidate precedes the cut or equals it.
    #[inline(always)]
    pub(in crate::cpu) fn keeps(self, weight: f32, id: u32) -> bool {
        weight > self.weight || (weight == self.weight && id <= self.id)
    }
}

fn bucket_of(weight: f32) -> usize {
    ((weight.to_bits() >> SHIFT) as usize).min(BUCKETS - 1)
}

/// Returns the cut for `top_k` and `top_p`. `top_k` keeps that many of the likeliest candidates (0 keeps all). `top_p`
/// then keeps the fewest likeliest candidates that together hold at least this share of the weight that `top_k` kept (1
/// keeps all). Returns `None` if all candidates are kept. A weight of 0 is not a candidate.
pub(in crate::cpu) fn cut(weights: &[f32], top_k: usize, top_p: f32, scratch: &mut Scratch) -> Option<Cut> {
    scratch.counts.clear();
    scratch.counts.resize(BUCKETS, 0);
    scratch.masses.clear();
    scratch.masses.resize(BUCKETS, 0.0);
    for &weight in weights {
        let bucket = bucket_of(weight);
        scratch.counts[bucket] += 1;
        scratch.masses[bucket] += f64::from(weight);
    }
    let by_count = (top_k > 0).then(|| by_count(weights, top_k, scratch)).flatten();
    if top_p >= 1.0 {
        return by_count.map(|(cut, _)| cut);
    }
    let kept = by_count.map_or_else(|| scratch.masses.iter().rev().sum(), |(_, mass)| mass);
    let by_mass = by_mass(weights, kept * f64::from(top_p), scratch);
    match (by_count, by_mass) {
        // The cut that keeps fewer candidates applies.
        (Some((count, _)), Some(mass)) => Some(if count.keeps(mass.weight, mass.id) { mass } else { count }),
        (count, mass) => mass.or(count.map(|(cut, _)| cut)),
    }
}

/// Returns the candidate of rank `top_k` and the mass (sum of weights) of all candidates up to that one; `None` if
/// there are fewer candidates.
fn by_count(weights: &[f32], top_k: usize, scratch: &mut Scratch) -> Option<(Cut, f64)> {
    let (mut count, mut mass) = (0, 0.0);
    for bucket in (0..BUCKETS).rev() {
        if count + scratch.counts[bucket] < top_k {
            count += scratch.counts[bucket];
            mass += scratch.masses[bucket];
            continue;
        }
        sort_bucket(weights, bucket, &mut scratch.bucket);
        let kept = &scratch.bucket[..top_k - count];
        mass += kept.iter().map(|&(weight, _)| f64::from(weight)).sum::<f64>();
        return kept.last().map(|&(weight, id)| (Cut { weight, id }, mass));
    }
    None
}

/// Returns the first candidate whose cumulative mass is at least `wanted`.
fn by_mass(weights: &[f32], wanted: f64, scratch: &mut Scratch) -> Option<Cut> {
    let mut mass = 0.0;
    for bucket in (0..BUCKETS).rev() {
        if mass + scratch.masses[bucket] < wanted || scratch.counts[bucket] == 0 {
            mass += scratch.masses[bucket];
            continue;
        }
        sort_bucket(weights, bucket, &mut scratch.bucket);
        for &(weight, id) in &scratch.bucket {
            mass += f64::from(weight);
            if mass >= wanted {
                return Some(Cut { weight, id });
            }
        }
        // Summed in this order, the bucket's weights round to a little less than `wanted`, so the cut is the bucket's
        // last candidate.
        return scratch.bucket.last().map(|&(weight, id)| Cut { weight, id });
    }
    None
}

/// Collects the candidates of a bucket in order.
fn sort_bucket(weights: &[f32], bucket: usize, out: &mut Vec<(f32, u32)>) {
    out.clear();
    let ids = (0u32..).zip(weights).filter(|&(_, &weight)| bucket_of(weight) == bucket);
    out.extend(ids.map(|(id, &weight)| (weight, id)));
    out.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
}

#[cfg(test)]
mod tests;
