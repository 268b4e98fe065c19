//! The trial of algorithms at load.
//!
//! Algorithms whose rows have the same bits form a class. The class that serves the most sizes is taken, and its first
//! algorithm is the plan's anchor. For each bucket, the fastest algorithm of the class is chosen by timing. The choice
//! may differ between starts. The bits do not: the class follows from what cuBLASLt proposes, and a chosen algorithm
//! has given the anchor's bits for many numbers of rows.

use std::sync::Arc;

use self::operands::{Moment, TrialOperands};
use super::Accumulate;
use super::plan::{Algorithm, BUCKETS, Plan};
use crate::DeviceError;
use crate::cuda::context::Gpu;
use crate::cuda::tensor::Matrix;

mod operands;

/// Maximum bytes of a trial's output. A bucket with a larger output is tried with fewer rows.
const OUTPUT_BYTES: usize = 256 << 20;
/// Timed products per algorithm. The fastest counts.
const ROUNDS: usize = 3;
/// An algorithm replaces the anchor if it takes at most this share of its time. Smaller differences are noise.
const GAIN: f32 = 0.95;
/// Rows whose bits are compared, as far as a product has them.
const COMPARED: [usize; 18] = [0, 1, 2, 3, 5, 7, 11, 15, 16, 31, 32, 63, 64, 127, 255, 256, 511, 2047];
/// Rows whose bits tell the classes apart. Each bucket has them.
const TOLD_APART: [usize; 2] = [0, 5];

/// The algorithms that cuBLASLt proposes for a bucket.
struct Proposed {
    /// Numbers of rows for which an algorithm is compared with the anchor. The last one is timed.
    counts: Vec<usize>,
    algorithms: Vec<Algorithm>,
}

/// Algorithms with the same bits, in the order in which cuBLASLt proposed them.
struct Class {
    bits: Vec<u8>,
    algorithms: Vec<Algorithm>,
    /// Number of buckets for which an algorithm of the class is proposed.
    buckets: usize,
}

/// Chooses the fastest algorithm of each bucket, in products with `matrix`. If there is only one algorithm, or none
/// that serves all numbers of rows, the plan keeps its anchor for all buckets.
///
/// Too little memory for the trial is an error: a worker without a trial could have other bits than its peers.
pub(super) fn choose(gpu: &Arc<Gpu>, plan: &mut Plan, matrix: &Matrix) -> Result<(), DeviceError> {
    let most = (OUTPUT_BYTES / (plan.key.outputs * size_of::<f32>())).max(TOLD_APART[1] + 1);
    let mut least = 0;
    let buckets = BUCKETS.map(|rows| {
        let counts = counts(least, rows.min(most));
        least = rows.min(most);
        let algorithms = counts.last().and_then(|&rows| plan.proposals(rows).ok()).unwrap_or_default();
        Proposed { counts, algorithms }
    });
    if buckets.iter().flat_map(|bucket| &bucket.algorithms).all(|algorithm| *algorithm == plan.anchor) {
        return Ok(());
    }
    let trial = Trial::new(gpu, plan, matrix, BUCKETS[BUCKETS.len() - 1].min(most))?;
    let Some(class) = trial.best_class(plan, &buckets)? else { return Ok(()) };
    let mut anchor = None;
    for algorithm in &class.algorithms {
        if trial.is_anchor(plan, algorithm, &buckets)? {
            anchor = Some(*algorithm);
            break;
        }
    }
    let Some(anchor) = anchor else { return Ok(()) };
    (plan.anchor, plan.fastest) = (anchor, [[anchor; 2]; BUCKETS.len()]);
    for accumulate in [Accumulate::Set, Accumulate::Add] {
        let wanted = trial.rows_alone(plan, &anchor, accumulate)?;
        for (bucket, proposed) in buckets.iter().enumerate() {
            let fastest = trial.fastest(plan, proposed, &class, accumulate, &wanted)?;
            plan.fastest[bucket][accumulate as usize] = fastest;
        }
    }
    Ok(())
}

/// Numbers of rows from `least + 1` to `most` for which algorithms are compared: all small ones, and the ends and the
/// middle of a large bucket.
fn counts(least: usize, most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> = match most {
        0..=16 => (least + 1..=most).collect(),
        _ => vec![least + 1, least + 2, least + least / 2 + 1, (least + most) / 2 + 1, most - 1, most],
    };
    counts.retain(|rows| *rows > least && *rows <= most);
    counts
}

/// Bits of rows of an output, by the number of the row.
type Rows = Vec<(usize, Vec<u8>)>;

struct Trial<'a> {
    gpu: &'a Arc<Gpu>,
    operands: TrialOperands<'a>,
    begin: Moment,
    end: Moment,
}

impl<'a> Trial<'a> {
    fn new(gpu: &'a Arc<Gpu>, plan: &Plan, matrix: &'a Matrix, most: usize) -> Result<Self, DeviceError> {
        let operands = TrialOperands::new(gpu, plan.key, matrix, most)?;
        Ok(Self { gpu, operands, begin: Moment::new(gpu)?, end: Moment::new(gpu)? })
    }

    /// Returns the class that is proposed for the most buckets and, among those, has the most algorithms.
    fn best_class(&self, plan: &Plan, buckets: &[Proposed]) -> Result<Option<Class>, DeviceError> {
        let mut classes: Vec<Class> = Vec::new();
        for bucket in buckets {
            let Some(&rows) = bucket.counts.last() else { continue };
            let mut seen: Vec<usize> = Vec::new();
            for algorithm in &bucket.algorithms {
                if !self.operands.run(plan, algorithm, rows, Accumulate::Set)? {
                    continue;
                }
                let bits: Vec<u8> = TOLD_APART
                    .into_iter()
                    .map(|row| self.operands.read(row))
                    .collect::<Result<Vec<_>, _>>()?
                    .concat();
                let at = classes.iter().position(|class| class.bits == bits).unwrap_or(classes.len());
                if at == classes.len() {
                    classes.push(Class { bits, algorithms: Vec::new(), buckets: 0 });
                }
                let class = &mut classes[at];
                if !seen.contains(&at) {
                    seen.push(at);
                    class.buckets += 1;
                }
                if !class.algorithms.contains(algorithm) {
                    class.algorithms.push(*algorithm);
                }
            }
        }
        // Among equal classes, the first one counts, so that the order of proposals decides.
        classes.reverse();
        Ok(classes.into_iter().max_by_key(|class| (class.buckets, class.algorithms.len())))
    }

    /// True if an algorithm serves all numbers of rows, and each row has the bits that it has alone.
    fn is_anchor(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        buckets: &[Proposed],
    ) -> Result<bool, DeviceError> {
        for accumulate in [Accumulate::Set, Accumulate::Add] {
            if !self.operands.run(plan, algorithm, 1, accumulate)? {
                return Ok(false);
            }
            let wanted = self.rows_alone(plan, algorithm, accumulate)?;
            for &rows in buckets.iter().flat_map(|bucket| &bucket.counts) {
                if self.equals(plan, algorithm, rows, accumulate, &wanted)? != Some(true) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns the rows that an algorithm computes one at a time.
    fn rows_alone(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        accumulate: Accumulate,
    ) -> Result<Rows, DeviceError> {
        let rows = COMPARED.into_iter().filter(|row| *row < self.operands.most());
        rows.map(|row| {
            if !self.operands.run_alone(plan, algorithm, row, accumulate)? {
                let key = plan.key;
                return Err(DeviceError::Unsupported(format!(
                    "cuBLASLt has no product of one row with {key}"
                )));
            }
            Ok((row, self.operands.read(0)?))
        })
        .collect()
    }

    /// Returns true if the rows of a product have the bits of `wanted`; `None` if cuBLASLt refuses the product.
    fn equals(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        rows: usize,
        accumulate: Accumulate,
        wanted: &Rows,
    ) -> Result<Option<bool>, DeviceError> {
        if !self.operands.run(plan, algorithm, rows, accumulate)? {
            return Ok(None);
        }
        for (row, bits) in wanted.iter().filter(|(row, _)| *row < rows) {
            if self.operands.read(*row)? != *bits {
                return Ok(Some(false));
            }
        }
        Ok(Some(true))
    }

    /// Returns the fastest algorithm of a bucket that has the anchor's bits for all numbers of rows that are compared,
    /// except those that cuBLASLt refuses.
    fn fastest(
        &self,
        plan: &Plan,
        proposed: &Proposed,
        class: &Class,
        accumulate: Accumulate,
        wanted: &Rows,
    ) -> Result<Algorithm, DeviceError> {
        let Some(&rows) = proposed.counts.last() else { return Ok(plan.anchor) };
        let time = |algorithm| self.time(plan, algorithm, rows, accumulate);
        let least = GAIN * time(&plan.anchor)?.unwrap_or(f32::INFINITY);
        let mut timed = Vec::new();
        for algorithm in proposed.algorithms.iter().filter(|algorithm| class.algorithms.contains(algorithm)) {
            timed.extend(time(algorithm)?.filter(|time| *time < least).map(|time| (time, *algorithm)));
        }
        timed.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        'algorithms: for (_, algorithm) in timed {
            for &rows in &proposed.counts {
                if self.equals(plan, &algorithm, rows, accumulate, wanted)? == Some(false) {
                    continue 'algorithms;
                }
            }
            return Ok(algorithm);
        }
        Ok(plan.anchor)
    }

    /// Returns the shortest time of a product, in milliseconds; `None` if cuBLASLt refuses it.
    fn time(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        rows: usize,
        accumulate: Accumulate,
    ) -> Result<Option<f32>, DeviceError> {
        let failed = |error| self.gpu.lost("a trial of a product", error);
        let mut least = f32::INFINITY;
        for _ in 0..ROUNDS {
            self.operands.flush()?;
            self.begin.record().map_err(failed)?;
            if !self.operands.run_once(plan, algorithm, rows, accumulate)? {
                return Ok(None);
            }
            self.end.record().map_err(failed)?;
            self.gpu.synchronize()?;
            least = least.min(self.begin.milliseconds_until(&self.end).map_err(failed)?);
        }
        Ok(Some(least))
    }
}
