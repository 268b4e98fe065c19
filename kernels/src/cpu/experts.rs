//! Routing of tokens to experts, and the order in which experts compute.
//!
//! Each row's weights are computed from its own logits alone. Rows are then sorted by expert (a counting sort), so that
//! an expert's weights are read once for all of its rows. One operation computes as many experts as the buffers have
//! room for. An expert adds to a row after all experts of lower index, so that the order of a row's sum is the same in
//! any batch.

use std::ops::Range;

use crate::cpu::gemm::groups::Group;
use crate::cpu::memory::Shared;
use crate::cpu::rowwise::{TASK_ELEMENTS, each_row};
use crate::cpu::simd::LANES;
use crate::cpu::threads::pool::ThreadPool;
use crate::{DeviceError, Routing, Score};

/// Minimum number of columns per task of [`scatter_add`], so that a task reads several adjacent cache lines per row.
const LEAST_COLUMNS: usize = 64;

/// An expert that a row has chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Choice {
    expert: u32,
    weight: f32,
}

/// The choice of a row's experts.
#[derive(Clone, Copy)]
pub(super) enum RowChoice<'a> {
    /// The experts with the largest scores, each plus the expert's element of this vector.
    Largest(Option<&'a [f32]>),
    /// The experts in the row of `table`, `[vocabulary, top_k]`, of the row's token id.
    ByToken { table: &'a [f32], token_ids: &'a [u32] },
}

/// The rules of one layer's routing.
pub(super) struct Router<'a> {
    pub(super) routing: Routing,
    pub(super) choice: RowChoice<'a>,
    /// Number of experts.
    pub(super) experts: usize,
}

impl Router<'_> {
    /// Refuses a table without experts for the first `rows` rows, or with experts that do not exist.
    pub(super) fn check(&self, rows: usize) -> Result<(), DeviceError> {
        let RowChoice::ByToken { token_ids, .. } = self.choice else { return Ok(()) };
        for (row, id) in token_ids.iter().enumerate().take(rows) {
            let listed = self.listed(row);
            if listed.is_none_or(|listed| listed.iter().any(|&expert| expert as usize >= self.experts)) {
                let experts = self.experts;
                return Err(DeviceError::Misuse(format!("experts {listed:?} of token {id}, of {experts}")));
            }
        }
        Ok(())
    }

    /// Returns the experts in the table's row for a row's token; `None` without such a row.
    fn listed(&self, row: usize) -> Option<&[f32]> {
        let RowChoice::ByToken { table, token_ids } = self.choice else { return None };
        let top_k = self.routing.top_k;
        table.get(*token_ids.get(row)? as usize * top_k..)?.get(..top_k)
    }

    /// Chooses `choices.len()` experts for a row, and computes their weights. `logits` are those of the row.
    fn choose(&self, row: usize, logits: &[f32], choices: &mut [Choice]) {
        let Routing { score, renormalise, scale, .. } = self.routing;
        let scores = Scores::of(logits, score);
        match (self.choice, score) {
            (RowChoice::ByToken { .. }, _) => {
                let listed = self.listed(row).unwrap_or_default();
                for (choice, &expert) in choices.iter_mut().zip(listed) {
                    choice.expert = expert as u32;
                }
            }
            // The softmax of a larger logit is larger, too.
            (RowChoice::Largest(None), Score::Softmax) => {
                largest(|expert| logits[expert], logits.len(), choices)
            }
            (RowChoice::Largest(bias), _) => {
                let term = |expert: usize| bias.map_or(0.0, |bias| bias[expert]);
                largest(|expert| scores.of_logit(logits[expert]) + term(expert), logits.len(), choices);
            }
        }
        for choice in &mut *choices {
            choice.weight = scores.of_logit(logits[choice.expert as usize]);
        }
        if renormalise {
            let sum = choices.iter().map(|choice| choice.weight).sum::<f32>() + LEAST_SUM;
            choices.iter_mut().for_each(|choice| choice.weight /= sum);
        }
        choices.iter_mut().for_each(|choice| choice.weight *= scale);
    }
}

/// Number that is added to the sum of a row's weights before they are divided by it.
const LEAST_SUM: f32 = 1e-20;

/// The scores of one row's logits.
enum Scores {
    /// The softmax: the largest logit, and the sum of the powers of all logits.
    Softmax { most: f32, sum: f32 },
    /// The square root of the softplus.
    SqrtSoftplus,
    /// NaN for each logit of a row with a logit that is NaN or positive infinity.
    NotFinite,
}

impl Scores {
    fn of(logits: &[f32], score: Score) -> Self {
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Self::NotFinite;
        }
        match score {
            Score::Softmax => {
                let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                Self::Softmax { most, sum: logits.iter().map(|logit| (logit - most).exp()).sum() }
            }
            Score::SqrtSoftplus => Self::SqrtSoftplus,
        }
    }

    fn of_logit(&self, logit: f32) -> f32 {
        match self {
            Self::Softmax { most, sum } => (logit - most).exp() / sum,
            // As in torch, the softplus of a large number is that number.
            Self::SqrtSoftplus if logit > 20.0 => logit.sqrt(),
            Self::SqrtSoftplus => logit.exp().ln_1p().sqrt(),
            Self::NotFinite => f32::NAN,
        }
    }
}

/// A row that has chosen an expert, and the expert's weight in the row's sum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Routed {
    pub(super) row: u32,
    pub(super) weight: f32,
}

/// The routes of one layer's rows. The memory is reused by every layer and step.
#[derive(Default)]
pub(super) struct Routes {
    /// The choices of each row, `[rows, top_k]`.
    choices: Vec<Choice>,
    /// All choices, sorted by expert and then by row.
    sorted: Vec<Routed>,
    /// Per expert, the index in `sorted` of the expert's first row. The end of the last expert's rows follows.
    starts: Vec<usize>,
    /// The groups of one operation: one group per expert that has rows.
    groups: Vec<Group>,
}

impl Routes {
    /// Makes room for steps of up to `rows` rows.
    pub(super) fn fit(&mut self, rows: usize, experts: usize, top_k: usize) {
        let Self { choices, sorted, starts, groups } = self;
        choices.clear();
        choices.reserve_exact(rows * top_k);
        sorted.clear();
        sorted.reserve_exact(rows * top_k);
        starts.clear();
        starts.reserve_exact(experts + 2);
        groups.clear();
        groups.reserve_exact(experts);
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        let Self { choices, sorted, starts, groups } = self;
        choices.capacity() * size_of::<Choice>()
            + sorted.capacity() * size_of::<Routed>()
            + starts.capacity() * size_of::<usize>()
            + groups.capacity() * size_of::<Group>()
    }

    /// Routes rows by their logits, `[rows, experts]`.
    pub(super) fn route(
        &mut self,
        pool: &mut ThreadPool,
        logits: &[f32],
        router: &Router<'_>,
    ) -> Result<(), DeviceError> {
        let (experts, top_k) = (router.experts, router.routing.top_k);
        let rows = logits.len() / experts;
        self.choices.clear();
        self.choices.resize(rows * top_k, Choice::default());
        let choices = Shared::new(&mut self.choices[..]);
        let share = (TASK_ELEMENTS / experts).max(1);
        pool.run(rows.div_ceil(share), |task, _| {
            for row in task * share..rows.min((task + 1) * share) {
                // SAFETY: each row belongs to one task, so no other task accesses the row's choices.
                let choices = unsafe { choices.slice_mut(row * top_k, top_k) };
                router.choose(row, &logits[row * experts..][..experts], choices);
            }
        })?;
        self.sort(experts, top_k);
        Ok(())
    }

    fn sort(&mut self, experts: usize, top_k: usize) {
        let Self { choices, sorted, starts, .. } = self;
        // Entry `e + 2` first counts the rows of expert `e`. The running sums turn entry `e + 1` into the start of
        // expert `e`. Each row that is placed advances this entry, so that in the end entry `e + 1` is the end of
        // expert `e`, and entry `e` its start.
        starts.clear();
        starts.resize(experts + 2, 0);
        choices.iter().for_each(|choice| starts[choice.expert as usize + 2] += 1);
        for expert in 2..starts.len() {
            starts[expert] += starts[expert - 1];
        }
        sorted.clear();
        sorted.resize(choices.len(), Routed::default());
        for (index, &Choice { expert, weight }) in choices.iter().enumerate() {
            let next = &mut starts[expert as usize + 1];
            sorted[*next] = Routed { row: (index / top_k) as u32, weight };
            *next += 1;
        }
        starts.pop();
    }

    /// Groups rows by expert, from the first of `experts` on. The first expert is always included, and each following
    /// one while the total is at most `most` rows. Returns the index after the last included expert, the groups, and
    /// their rows, which ascend within an expert. A group's `matrix` is counted from the first of `experts`.
    pub(super) fn group(&mut self, experts: Range<usize>, most: usize) -> (usize, &[Group], &[Routed]) {
        let from = self.starts[experts.start];
        let fits = |expert: &usize| self.starts[expert + 1] - from <= most;
        let end = experts.clone().skip(1).find(|expert| !fits(expert)).unwrap_or(experts.end);
        self.groups.clear();
        for (matrix, expert) in (experts.start..end).enumerate() {
            let Range { start, end } = self.range(expert);
            if start < end {
                self.groups.push(Group { matrix, rows: (start - from, end - from) });
            }
        }
        (end, &self.groups, &self.sorted[from..self.starts[end]])
    }

    fn range(&self, expert: usize) -> Range<usize> {
        self.starts[expert]..self.starts[expert + 1]
    }

    /// Adds the number of rows of each expert to `totals`.
    pub(super) fn count(&self, totals: &mut [u64]) {
        for (expert, total) in totals.iter_mut().enumerate() {
            *total += self.range(expert).len() as u64;
        }
    }
}

/// Chooses `choices.len()` of `experts` experts, in descending order of their values.
fn largest(value: impl Fn(usize) -> f32, experts: usize, choices: &mut [Choice]) {
    let mut chosen = 0;
    for (expert, value) in (0..).zip((0..experts).map(value)) {
        // A value is inserted after all values that are at least as large. Among equal values, the expert with the
        // lowest index therefore stays first.
        let index = choices[..chosen].partition_point(|other| other.weight >= value);
        if index == choices.len() {
            continue;
        }
        chosen = (chosen + 1).min(choices.len());
        choices[index..chosen].rotate_right(1);
        choices[index] = Choice { expert, weight: value };
    }
}

/// Copies each of `rows` from `x` to the next row of `to`. Rows of `x` and `to` have `width` elements.
pub(super) fn gather(
    pool: &mut ThreadPool,
    x: &[f32],
    width: usize,
    rows: &[Routed],
    to: &mut [f32],
) -> Result<(), DeviceError> {
    each_row(pool, to, width, |index, to| to.copy_from_slice(&x[rows[index].row as usize * width..][..width]))
}

/// Adds the weighted outputs of experts to the rows of `out`. Rows of `outputs` and `out` have `width` elements. A task
/// computes some columns of all rows, so that each element adds up its experts in the order of `rows`.
pub(super) fn scatter_add(
    pool: &mut ThreadPool,
    outputs: &[f32],
    width: usize,
    rows: &[Routed],
    out: &mut [f32],
) -> Result<(), DeviceError> {
    let least = (TASK_ELEMENTS / rows.len().max(1)).max(LEAST_COLUMNS);
    let share = width.div_ceil(2 * pool.threads()).max(least).next_multiple_of(LANES);
    let out = Shared::new(out);
    pool.run(width.div_ceil(share), |task, _| {
        let (first, end) = (task * share, width.min((task + 1) * share));
        for (index, &Routed { row, weight }) in rows.iter().enumerate() {
            // SAFETY: each column belongs to one task, so no other task accesses these elements. The task holds one
            // such slice at a time.
            let out = unsafe { out.slice_mut(row as usize * width + first, end - first) };
            out.iter_mut().zip(&outputs[index * width + first..]).for_each(|(out, y)| *out += weight * y);
        }
    })
}

#[cfg(test)]
mod tests;
