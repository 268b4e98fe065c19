//! Which requests share the next step, and how many tokens each computes.
//!
//! Every decode gets its token first; prefills share what is left of the budget. A prefill that may be cut gets a chunk
//! that ends with a page where it can, so that no crumbs of a budget become slivers of a prompt. One that must not be cut
//! goes in when it fits. When it does not it is left out, but not for ever: once [`PATIENCE`] steps have run without
//! it, it comes before all other prefills, the longest left out first, and if even then it does not fit beside the
//! decodes, it gets the step alone, over budget if need be.

use std::cmp::Reverse;

use tutti_proto::declaration::WalkId;

use crate::{
    config::{PrefillSharing, SchedulerConfig},
    pace::{Allowance, Pace},
    request::{Cut, Phase, Running, Ticket},
    step_time::Work,
    walks::Walks,
};

/// How many steps may leave a prefill out before it comes first; also how many steps the decodes have between two that
/// somebody took alone.
pub const PATIENCE: u32 = 4;

/// What the next step is made of.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// The mixed walk that batches all of it.
    pub mixed: WalkId,
    /// Decodes first. Within the budget, unless one prefill has it alone.
    pub shares: Vec<Share>,
    /// Prefills that had to let somebody else go first, by their places.
    pub passed_over: Vec<usize>,
    /// Decodes wait for a prefill that does not fit beside them.
    pub alone: bool,
}

/// One request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// Among the candidates.
    pub place: usize,
    pub walk: WalkId,
    pub tokens: usize,
}

/// A request that can be part of the step.
#[derive(Debug)]
pub(crate) struct Candidate<'a> {
    pub ticket: Ticket,
    pub request: &'a mut Running,
    phase: Phase,
    /// The mixed walk that batches it.
    mixed: WalkId,
}

impl<'a> Candidate<'a> {
    /// None if the request cannot take part now.
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

/// What came before the step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    /// What the last step was batched by.
    pub mixed: Option<WalkId>,
    /// Steps since one that a prefill had alone.
    pub since_alone: u32,
}

#[derive(Clone, Copy, Debug)]
struct Prefill {
    /// Among the candidates, which are in the order of their tickets.
    place: usize,
    walk: WalkId,
    cut: Cut,
    /// The next position to compute.
    start: usize,
    /// Tokens left of the segment.
    left: usize,
    age: u32,
    /// What it gets of this step.
    tokens: usize,
}

/// Fills a step from the candidates, which are in order; none if there are none. The running set is no larger than the
/// budget (`SchedulerConfig::slots`), so every decode fits.
pub(crate) fn pack(
    candidates: &[Candidate<'_>],
    config: &SchedulerConfig,
    pace: &Pace,
    before: Before,
) -> Option<Packing> {
    let mixed = next_in_turn(candidates.iter().map(|candidate| candidate.mixed), before.mixed)?;
    let mut shares = Vec::with_capacity(candidates.len());
    let mut decodes = Work::default();
    let mut prefills = Vec::new();
    for (place, candidate) in candidates.iter().enumerate().filter(|(_, other)| other.mixed == mixed) {
        match candidate.phase {
            Phase::Decoding { walk } => {
                decodes.add_decode(candidate.request.computed());
                shares.push(Share { place, walk, tokens: 1 });
            }
            Phase::Prefilling { walk, cut, left } => {
                let (start, age) = (candidate.request.computed(), candidate.request.passed_over);
                prefills.push(Prefill { place, walk, cut, start, left, age, tokens: 0 });
            }
        }
    }
    let alone = share_out(&mut prefills, &decodes, config, pace, before.since_alone);
    if alone {
        shares.clear();
    }
    let served = prefills.iter().filter(|prefill| prefill.tokens > 0);
    shares.extend(served.map(|&Prefill { place, walk, tokens, .. }| Share { place, walk, tokens }));
    Some(Packing { mixed, shares, passed_over: passed_over(&prefills, config.prefill_sharing), alone })
}

/// Mixed walks that have something to run take turns.
fn next_in_turn(ready: impl Iterator<Item = WalkId>, last: Option<WalkId>) -> Option<WalkId> {
    ready.min_by_key(|&walk| (last.is_some_and(|last| walk <= last), walk))
}

/// Gives each prefill its tokens. True if the first of them has the step alone.
fn share_out(
    prefills: &mut [Prefill],
    beside: &Work,
    config: &SchedulerConfig,
    pace: &Pace,
    since_alone: u32,
) -> bool {
    let decodes = beside.decodes();
    let sharing = config.prefill_sharing;
    let by_age = |prefill: &Prefill| sharing == PrefillSharing::Fair || prefill.is_overdue();
    let order = |prefill: &Prefill| if by_age(prefill) { prefill.age } else { 0 };
    prefills.sort_by_key(|prefill| (Reverse(order(prefill)), prefill.place));
    let budget = config.max_step_tokens.saturating_sub(decodes);
    let may_be_alone = |first: &Prefill| decodes == 0 || first.is_overdue() && since_alone >= PATIENCE;
    if let Some(first) = prefills.first_mut()
        && (first.is_whole() && first.left > budget && may_be_alone(first))
    {
        first.tokens = first.left;
        return true;
    }
    let mut step = Room::new(config, budget, decodes + prefills.len());
    step.paced = pace.beside(beside, step.grid);
    let overdue = prefills.iter().take_while(|prefill| prefill.is_overdue()).count();
    let (overdue, in_time) = prefills.split_at_mut(overdue);
    overdue.iter_mut().for_each(|prefill| step.serve(prefill, usize::MAX));
    match sharing {
        PrefillSharing::Fair => step.share_equally(in_time),
        PrefillSharing::FirstCome => (),
        PrefillSharing::ShortestFirst => {
            if let Some(first) = in_time.first_mut() {
                step.serve(first, step.half_for(first));
            }
            in_time.sort_by_key(|prefill| (prefill.left - prefill.tokens, prefill.place));
        }
    }
    in_time.iter_mut().for_each(|prefill| step.serve(prefill, usize::MAX));
    false
}

/// Those that get nothing and should have: whoever may never be cut, whoever has an equal right, and whoever came
/// before somebody who is served.
fn passed_over(prefills: &[Prefill], sharing: PrefillSharing) -> Vec<usize> {
    let last_served = prefills.iter().filter(|prefill| prefill.tokens > 0).map(|prefill| prefill.place).max();
    let left_out = prefills.iter().filter(|prefill| prefill.tokens == 0);
    let passed =
        |p: &&Prefill| p.is_whole() || sharing == PrefillSharing::Fair || Some(p.place) < last_served;
    left_out.filter(passed).map(|prefill| prefill.place).collect()
}

impl Prefill {
    fn is_whole(&self) -> bool {
        self.cut != Cut::Anywhere
    }

    fn is_overdue(&self) -> bool {
        self.age >= PATIENCE
    }
}

/// What a step has left for prefills.
#[derive(Debug)]
struct Room {
    /// Tokens of the budget.
    budget: usize,
    /// What the decodes' pace allows.
    paced: Allowance,
    /// The most for one prefill that may be cut.
    cap: usize,
    /// Chunks end at multiples of this.
    grid: usize,
    /// Whether somebody has been served.
    begun: bool,
}

impl Room {
    fn new(config: &SchedulerConfig, budget: usize, rows: usize) -> Self {
        let threshold = config.long_prefill_tokens.filter(|_| rows > 1);
        let caps = [config.max_prefill_chunk, threshold, Some(config.max_step_tokens)];
        let cap = caps.into_iter().flatten().min().unwrap_or(budget);
        let grid = if cap < config.page_tokens { 1 } else { config.page_tokens };
        Self { budget, paced: Allowance::ALL, cap, grid, begun: false }
    }

    /// Whoever cannot be cut and is overdue has waited long enough for the decodes' pace not to matter.
    fn room_for(&self, prefill: &Prefill) -> usize {
        let unpaced = prefill.is_whole() && prefill.is_overdue();
        let from = prefill.start + prefill.tokens;
        if unpaced { self.budget } else { self.budget.min(self.paced.tokens(from)) }
    }

    /// Gives a prefill as much as it can get, up to `share`, beyond what it has.
    fn serve(&mut self, prefill: &mut Prefill, share: usize) {
        let room = self.room_for(prefill).min(share);
        let left = prefill.left - prefill.tokens;
        let tokens = match prefill.is_whole() {
            true if left <= room => left,
            true => 0,
            false => self.chunk(prefill, left, room),
        };
        self.paced.spend(prefill.start + prefill.tokens, tokens);
        prefill.tokens += tokens;
        self.budget -= tokens;
        self.begun |= tokens > 0;
    }

    /// A chunk ends with its segment or on the grid; only the step's first prefill may end elsewhere, so that it moves
    /// on however little room there is.
    fn chunk(&self, prefill: &Prefill, left: usize, room: usize) -> usize {
        let most = left.min(self.cap.saturating_sub(prefill.tokens)).min(room);
        let from = prefill.start + prefill.tokens;
        let on_grid = ((from + most) / self.grid * self.grid).saturating_sub(from);
        match on_grid {
            _ if most == left => left,
            0 if !self.begun => most,
            _ => on_grid,
        }
    }

    /// Half of what there is, or all of it where half is less than a chunk, or where the prefill cannot be cut.
    fn half_for(&self, prefill: &Prefill) -> usize {
        let half = self.room_for(prefill) / 2;
        if prefill.is_whole() || half < self.grid { usize::MAX } else { half }
    }

    /// Max-min fair: equal shares, and what the smallest leave of theirs is shared by the others. Where there is less
    /// than a chunk for each, the first ones get a chunk and the others come first in a later step.
    fn share_equally(&mut self, prefills: &mut [Prefill]) {
        // As if all were where the farthest is: what this leaves of the pace goes to whoever is first.
        let farthest = prefills.iter().map(|prefill| prefill.start).max().unwrap_or(0);
        let mut room = self.budget.min(self.paced.tokens(farthest));
        let served = prefills.len().min((room / self.grid).max(1));
        let mut by_need: Vec<&mut Prefill> = prefills[..served].iter_mut().collect();
        by_need.sort_by_key(|prefill| prefill.left);
        for (place, prefill) in by_need.into_iter().enumerate() {
            let share = room / (served - place);
            self.serve(prefill, share);
            room = self.budget.min(self.paced.tokens(farthest));
        }
    }
}
