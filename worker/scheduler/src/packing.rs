//! The policy of a step: the requests that share it, and the number of tokens that each computes.
//!
//! Every decode gets its token first, and prefills share the rest of the budget. A prefill that may be cut gets a chunk
//! that ends at a page boundary where possible, so that a small remainder of the budget does not cut a prompt into tiny
//! chunks. If the model has planes in slots, no chunk goes beyond the next position at which the slot is saved
//! (`snapshots`). A prefill that must not be cut is packed when it fits. When it does not fit, it is passed over, but
//! not for ever: once [`PATIENCE`] steps have run without it, it is overdue and comes before all prefills that are not
//! overdue. Among several overdue prefills, the one passed over for longest comes first. If the first overdue prefill
//! still does not fit beside the decodes, it gets a step alone, over budget if necessary.
//!
//! The budget is divided equally among the callers that have prefills. Besides, a caller's prefill may make a step
//! longer only by a factor if another caller decodes in it (`Pace::allowance_beside`), so that a flood of prompts does
//! not stop the decodes of others.

use std::cmp::Reverse;

use tutti_proto::declaration::WalkId;
use tutti_settings::PrefillSharing;

use crate::{
    config::SchedulerConfig,
    pace::{Allowance, Pace},
    request::{Cut, Phase, Running},
    shares::{ShareId, Shares},
    step_time::Work,
    ticket::Ticket,
    walks::Walks,
};

/// Number of steps that may pass a prefill over before the prefill is overdue. Also the minimum number of steps between
/// two prefills that run alone while decodes wait.
pub const PATIENCE: u32 = 4;

/// The composition of the next step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// The mixed walk that batches all rows.
    pub mixed: WalkId,
    /// The shares of the step's requests, decodes first. Their tokens are within the budget, unless a prefill runs
    /// alone.
    pub shares: Vec<Share>,
    /// Prefills that were passed over, as indices into the candidates.
    pub passed_over: Vec<usize>,
    /// True if one prefill runs alone. Decodes, if there are any, wait for it.
    pub alone: bool,
}

/// One request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Index into the candidates.
    pub candidate: usize,
    pub walk: WalkId,
    pub tokens: usize,
}

/// A request that can take part in the step.
#[derive(Debug)]
pub(crate) struct Candidate<'a> {
    pub ticket: Ticket,
    pub request: &'a mut Running,
    phase: Phase,
    /// The mixed walk that batches the request's phase.
    mixed: WalkId,
}

impl<'a> Candidate<'a> {
    /// Makes the candidate of a request. None if the request cannot take part in the step now.
    pub fn new(
        ticket: Ticket,
        request: &'a mut Running,
        config: &SchedulerConfig,
        walks: &Walks,
    ) -> Option<Self> {
        if !request.is_ready(config.page_tokens) {
            return None;
        }
        let phase = request.phase()?;
        let mixed = walks.batched_by(phase.walk())?;
        Some(Self { ticket, request, phase, mixed })
    }
}

/// The inputs of the policy besides the candidates: the pace of steps, and the turns of the shares.
pub(crate) type Guides<'a> = (&'a Pace, &'a Shares);

/// The facts about past steps that the policy depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PastSteps {
    /// The mixed walk that batched the last step.
    pub mixed: Option<WalkId>,
    /// Number of steps since the last one in which a prefill ran alone.
    pub since_alone: u32,
}

/// The decodes of a step.
#[derive(Debug, Default)]
struct Decodes {
    work: Work,
    /// The caller of the first decode.
    caller: Option<ShareId>,
    /// True if the decodes are of more than one caller.
    are_of_several: bool,
}

impl Decodes {
    fn add(&mut self, position: usize, caller: ShareId) {
        self.work.add_decode(position);
        self.are_of_several |= *self.caller.get_or_insert(caller) != caller;
    }

    fn count(&self) -> usize {
        self.work.decodes()
    }

    /// True if a caller other than this one has a decode.
    fn has_another_than(&self, caller: ShareId) -> bool {
        self.are_of_several || self.caller.is_some_and(|first| first != caller)
    }
}

#[derive(Clone, Copy, Debug)]
struct Prefill {
    /// Index into the candidates, which are in the order of their tickets.
    candidate: usize,
    /// Sort key of the caller: the turn of the request's share (lowest first), then the share's number.
    caller: (u64, ShareId),
    walk: WalkId,
    cut: Cut,
    /// The next position to compute.
    start: usize,
    /// Number of tokens of the current segment that are not computed yet.
    left: usize,
    /// Number of tokens up to the next position at which the slot is saved, at most `left`. The prefill gets no more
    /// tokens in this step.
    to_rung: usize,
    /// Number of steps that have passed the prefill over since it was last served.
    age: u32,
    /// Number of tokens given to the prefill in this step so far.
    tokens: usize,
}

/// Packs a step from the candidates, which are in the order of their tickets. None if there are no candidates. Every
/// decode fits, because `SchedulerConfig::max_running` admits no more requests than the budget has tokens.
pub(crate) fn pack(
    candidates: &[Candidate<'_>],
    config: &SchedulerConfig,
    (pace, shares): Guides<'_>,
    past: PastSteps,
) -> Option<Packing> {
    let mixed = next_in_turn(candidates.iter().map(|candidate| candidate.mixed), past.mixed)?;
    let mut served = Vec::with_capacity(candidates.len());
    let mut decodes = Decodes::default();
    let mut prefills = Vec::new();
    for (index, candidate) in candidates.iter().enumerate().filter(|(_, other)| other.mixed == mixed) {
        match candidate.phase {
            Phase::Decoding { walk } => {
                decodes.add(candidate.request.planned(), candidate.request.share());
                served.push(Share { candidate: index, walk, tokens: 1 });
            }
            Phase::Prefilling { walk, cut, left } => {
                let (start, age) = (candidate.request.planned(), candidate.request.passed_over);
                let ladder = candidate.request.ladder(config.page_tokens).filter(|_| cut == Cut::Anywhere);
                let to_rung = ladder.map_or(left, |ladder| left.min(ladder.next(start) - start));
                let caller = candidate.request.share();
                let caller_turn = shares.prefill_turn(caller);
                prefills.push(Prefill {
                    candidate: index,
                    caller: (caller_turn, caller),
                    walk,
                    cut,
                    start,
                    left,
                    to_rung,
                    age,
                    tokens: 0,
                });
            }
        }
    }
    let alone = share_out(&mut prefills, &decodes, config, pace, past.since_alone);
    if alone {
        served.clear();
    }
    let begun = prefills.iter().filter(|prefill| prefill.tokens > 0);
    served.extend(begun.map(|&Prefill { candidate, walk, tokens, .. }| Share { candidate, walk, tokens }));
    Some(Packing {
        mixed,
        shares: served,
        passed_over: passed_over(&prefills, config.settings.prefill_sharing),
        alone,
    })
}

/// The mixed walk whose turn it is: among the mixed walks that have a candidate, the next one after `last` in cyclic
/// order of walk ids.
fn next_in_turn(ready: impl Iterator<Item = WalkId>, last: Option<WalkId>) -> Option<WalkId> {
    ready.min_by_key(|&walk| (last.is_some_and(|last| walk <= last), walk))
}

/// Sets the `tokens` of each prefill. Returns true if the first prefill runs alone.
fn share_out(
    prefills: &mut [Prefill],
    decodes: &Decodes,
    config: &SchedulerConfig,
    pace: &Pace,
    since_alone: u32,
) -> bool {
    let sharing = config.settings.prefill_sharing;
    let by_age = |prefill: &Prefill| sharing == PrefillSharing::Fair || prefill.is_overdue();
    let order = |prefill: &Prefill| if by_age(prefill) { prefill.age } else { 0 };
    prefills.sort_by_key(|prefill| (Reverse(order(prefill)), prefill.candidate));
    let budget = config.settings.max_step_tokens.saturating_sub(decodes.count());
    let may_be_alone =
        |first: &Prefill| decodes.count() == 0 || first.is_overdue() && since_alone >= PATIENCE;
    if let Some(first) = prefills.first_mut()
        && (first.is_whole() && first.left > budget && may_be_alone(first))
    {
        first.tokens = first.left;
        return true;
    }
    let mut step = PrefillBudget::new(config, budget, decodes.count() + prefills.len());
    let grid = step.grid;
    step.paced = pace.allowance(&decodes.work, grid);
    step.serve_all(prefills, sharing, |caller| match decodes.has_another_than(caller) {
        true => pace.allowance_beside(&decodes.work, grid),
        false => Allowance::ALL,
    });
    false
}

/// Prefills that get no tokens although they were entitled to some, as indices into the candidates. A prefill is
/// entitled to tokens if it must not be cut or if it precedes a served one. Under fair sharing all prefills are
/// entitled.
fn passed_over(prefills: &[Prefill], sharing: PrefillSharing) -> Vec<usize> {
    let last_served = prefills.iter().filter(|prefill| prefill.tokens > 0).map(|p| p.candidate).max();
    let left_out = prefills.iter().filter(|prefill| prefill.tokens == 0);
    let entitled =
        |p: &&Prefill| p.is_whole() || sharing == PrefillSharing::Fair || Some(p.candidate) < last_served;
    left_out.filter(entitled).map(|prefill| prefill.candidate).collect()
}

impl Prefill {
    fn is_whole(&self) -> bool {
        self.cut != Cut::Anywhere
    }

    fn is_overdue(&self) -> bool {
        self.age >= PATIENCE
    }
}

/// The part of a step's budget that is left for prefills.
#[derive(Debug)]
struct PrefillBudget {
    /// Number of tokens left of the step's budget.
    tokens: usize,
    /// The prefill for which the step still has time.
    paced: Allowance,
    /// The prefill that the caller now served may still have beside the decodes of others.
    own: Allowance,
    /// Maximum number of tokens in this step for one prefill that may be cut.
    cap: usize,
    /// Chunks end at positions that are multiples of this number.
    grid: usize,
    /// True once a prefill has been served.
    begun: bool,
}

impl PrefillBudget {
    fn new(config: &SchedulerConfig, tokens: usize, rows: usize) -> Self {
        let threshold = config.settings.long_prefill_token_threshold.filter(|_| rows > 1);
        let caps = [config.settings.max_prefill_chunk_size, threshold, Some(config.settings.max_step_tokens)];
        let cap = caps.into_iter().flatten().min().unwrap_or(tokens);
        let grid = if cap < config.page_tokens { 1 } else { config.page_tokens };
        Self { tokens, paced: Allowance::ALL, own: Allowance::ALL, cap, grid, begun: false }
    }

    /// Shares the budget among the prefills of all callers: each caller has an equal part of it, and at most its
    /// `allowance`.
    fn serve_all(
        &mut self,
        prefills: &mut [Prefill],
        sharing: PrefillSharing,
        allowance: impl Fn(ShareId) -> Allowance,
    ) {
        // The sort is stable, so that each caller's prefills keep their order.
        prefills.sort_by_key(|prefill| prefill.caller);
        let by_caller = prefills.chunk_by_mut(|a, b| a.caller == b.caller);
        let mut callers: Vec<_> = by_caller.map(|own| (allowance(own[0].caller.1), own)).collect();
        let count = callers.len();
        if count > 1 {
            // A prefill that must not be cut may need more than its caller's part. So one overdue prefill of each
            // caller is served first, without that limit.
            for (own, prefills) in &mut callers {
                let due = prefills.iter_mut().find(|prefill| prefill.is_whole() && prefill.is_overdue());
                self.within(own, |step| due.into_iter().for_each(|prefill| step.serve(prefill, usize::MAX)));
            }
        }
        for (served, (own, prefills)) in callers.iter_mut().enumerate() {
            // The part is rounded up to the grid, so that the division among callers ends no chunk off the grid.
            let part = self.tokens.div_ceil(count - served).next_multiple_of(self.grid).min(self.tokens);
            let rest = self.tokens - part;
            self.tokens = part;
            self.within(own, |step| step.serve_caller(prefills, sharing));
            self.tokens += rest;
        }
        // A caller may use less than its part. The tokens that are left go to the other callers.
        if count > 1 {
            for (own, prefills) in &mut callers {
                self.within(own, |step| {
                    prefills.iter_mut().for_each(|prefill| step.serve(prefill, usize::MAX))
                });
            }
        }
    }

    /// Serves prefills of one caller within the caller's own allowance.
    fn within(&mut self, own: &mut Allowance, serve: impl FnOnce(&mut Self)) {
        self.own = *own;
        serve(self);
        *own = self.own;
    }

    /// Shares the budget among the prefills of one caller, overdue ones first.
    fn serve_caller(&mut self, prefills: &mut [Prefill], sharing: PrefillSharing) {
        let overdue = prefills.iter().take_while(|prefill| prefill.is_overdue()).count();
        let (overdue, in_time) = prefills.split_at_mut(overdue);
        overdue.iter_mut().for_each(|prefill| self.serve(prefill, usize::MAX));
        match sharing {
            PrefillSharing::Fair => self.share_equally(in_time),
            PrefillSharing::FirstCome => (),
            PrefillSharing::ShortestFirst => {
                if let Some(first) = in_time.first_mut() {
                    self.serve(first, self.half_for(first));
                }
                in_time.sort_by_key(|prefill| (prefill.left - prefill.tokens, prefill.candidate));
            }
        }
        in_time.iter_mut().for_each(|prefill| self.serve(prefill, usize::MAX));
    }

    /// Maximum number of tokens that a prefill can still get in this step. For a prefill that must not be cut and is
    /// overdue, the time is ignored, because the prefill has waited long enough.
    fn left_for(&self, prefill: &Prefill) -> usize {
        let unpaced = prefill.is_whole() && prefill.is_overdue();
        if unpaced { self.tokens } else { self.left_from(prefill.start + prefill.tokens) }
    }

    /// Number of tokens from position `start` on for which the step has room and time.
    fn left_from(&self, start: usize) -> usize {
        self.tokens.min(self.paced.tokens(start)).min(self.own.tokens(start))
    }

    /// Gives a prefill as many further tokens as it can get, at most `share`.
    fn serve(&mut self, prefill: &mut Prefill, share: usize) {
        let most = self.left_for(prefill).min(share);
        let left = prefill.to_rung - prefill.tokens;
        let tokens = match prefill.is_whole() {
            true if left <= most => left,
            true => 0,
            false => self.chunk(prefill, left, most),
        };
        self.paced.spend(prefill.start + prefill.tokens, tokens);
        self.own.spend(prefill.start + prefill.tokens, tokens);
        prefill.tokens += tokens;
        self.tokens -= tokens;
        self.begun |= tokens > 0;
    }

    /// Number of tokens of the prefill's next chunk, at most `most`. `left` is the number of tokens up to the end of
    /// the prefill's segment or up to its next snapshot. A chunk ends there or on the grid. Only the chunk of the first
    /// prefill that the step serves may end elsewhere, so that this prefill advances even if the budget is less than a
    /// grid step.
    fn chunk(&self, prefill: &Prefill, left: usize, most: usize) -> usize {
        let most = left.min(self.cap.saturating_sub(prefill.tokens)).min(most);
        let from = prefill.start + prefill.tokens;
        let on_grid = ((from + most) / self.grid * self.grid).saturating_sub(from);
        match on_grid {
            _ if most == left => left,
            0 if !self.begun => most,
            _ => on_grid,
        }
    }

    /// Half of the tokens that the prefill could get. No limit (`usize::MAX`) if half is less than the grid or the
    /// prefill cannot be cut.
    fn half_for(&self, prefill: &Prefill) -> usize {
        let half = self.left_for(prefill) / 2;
        if prefill.is_whole() || half < self.grid { usize::MAX } else { half }
    }

    /// Shares the budget max-min fairly: all shares are equal, and what a small prefill does not need of its share goes
    /// to the other prefills. If the budget has less than one chunk per prefill, the first prefills get one chunk each,
    /// and the remaining prefills come first in a later step.
    fn share_equally(&mut self, prefills: &mut [Prefill]) {
        // Each token is counted with the time that it takes at the farthest position, where a token takes longest. If
        // time is left over, `serve_caller` gives it to the first prefills.
        let farthest = prefills.iter().map(|prefill| prefill.start).max().unwrap_or(0);
        let mut left = self.left_from(farthest);
        let served = prefills.len().min((left / self.grid).max(1));
        let mut by_need: Vec<&mut Prefill> = prefills[..served].iter_mut().collect();
        by_need.sort_by_key(|prefill| prefill.to_rung);
        for (index, prefill) in by_need.into_iter().enumerate() {
            let share = left / (served - index);
            self.serve(prefill, share);
            left = self.left_from(farthest);
        }
    }
}
