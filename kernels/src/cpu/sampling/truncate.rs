//! Top-k and top-p over unnormalised probabilities, by selection instead of a full sort.
//!
//! Candidates are ordered by falling weight, equals by rising id. A histogram over the weights' leading bits finds the
//! bucket in which the cut falls; only that bucket is sorted.

/// Exponent and three bits of the fraction: an eighth of a power of two.
const SHIFT: u32 = 20;
/// Weights lie in 0 ..= 1.
const BUCKETS: usize = (0x3f80_0000 >> SHIFT) + 1;

/// What truncation keeps from call to call.
#[derive(Default)]
pub(in crate::cpu) struct Scratch {
    counts: Vec<usize>,
    masses: Vec<f64>,
    bucket: Vec<(f32, u32)>,
}

impl Scratch {
    /// The most that one takes for a vocabulary: all candidates in one bucket, in a list that grows by doubling.
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
    /// Whether a candidate stands before the cut, or is it.
    #[inline(always)]
    pub(in crate::cpu) fn keeps(self, weight: f32, id: u32) -> bool {
        weight > self.weight || (weight == self.weight && id <= self.id)
    }
}

fn bucket_of(weight: f32) -> usize {
    ((weight.to_bits() >> SHIFT) as usize).min(BUCKETS - 1)
}

/// The cut that keeps the `top_k` likeliest (0: all), and of those the fewest likeliest that together hold `top_p` of
/// their probability (1: all). `None` keeps everything. Weights of 0 are no candidates.
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
        // The sharper cut wins.
        (Some((count, _)), Some(mass)) => Some(if count.keeps(mass.weight, mass.id) { mass } else { count }),
        (count, mass) => mass.or(count.map(|(cut, _)| cut)),
    }
}

/// The candidate of rank `top_k`, and the mass up to it; `None` if there are no more than that.
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

/// The first candidate up to which there is at least `wanted` mass.
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
        // The bucket's sum in this order rounds a little lower: then its last candidate is the one.
        return scratch.bucket.last().map(|&(weight, id)| Cut { weight, id });
    }
    None
}

fn sort_bucket(weights: &[f32], bucket: usize, out: &mut Vec<(f32, u32)>) {
    out.clear();
    let ids = (0u32..).zip(weights).filter(|&(_, &weight)| bucket_of(weight) == bucket);
    out.extend(ids.map(|(id, &weight)| (weight, id)));
    out.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
}

#[cfg(test)]
mod tests;
