//! The oracle's knowledge of a request, from its arrival until its last row is committed or aborted.

use tutti_proto::declaration::WalkId;
use tutti_scheduler::{Finish, NotSampled, Outcome, RowOutcome, SlotId};

use crate::{
    common::{AUDIO, EOS, STOP, TEXT},
    disaggregated::Away,
    memory::{History, remember},
    script::Arrival,
};

/// Counts of a request's positions, output tokens and forward passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub computed: usize,
    pub generated: u32,
    pub passes: u32,
}

/// A request that was accepted. It is kept until it has ended and no step uses its pages and slot.
pub struct Live<'a> {
    pub arrival: &'a Arrival,
    /// The history of all tokens so far, including those that rows in flight sample.
    pub history: History,
    /// The progress made by committed rows.
    pub committed: Progress,
    /// The progress made by all rows that were planned and not aborted.
    pub planned: Progress,
    /// Number of rows that were planned, but neither committed nor aborted.
    pub in_flight: usize,
    /// Number of tokens to compute before the request samples: the prefill and, after a preemption, the output so far.
    pub target: usize,
    /// True if no step has computed the request since its admission. Its first row may then start after a cached
    /// prefix.
    pub fresh: bool,
    /// The request's slot since its admission, once it is known.
    pub slot: Option<SlotId>,
    /// True once a planned step or an import has zeroed, restored or written the slot since the admission.
    pub initialised: bool,
    /// True once the device has run a row of the request that fails. Later rows of the request read and write garbage.
    pub poisoned: bool,
    /// Number of prompt tokens that came from the prefix cache at the request's first row.
    pub cached: Option<usize>,
    pub preempted: bool,
    pub cancelled: bool,
    /// The event at another worker that the request waits for.
    pub away: Away,
    /// True once the request's transfer has been reported as failed.
    pub failing: bool,
    /// Number of steps that were planned without the request since its last row. Counted once the request has computed
    /// a position.
    pub passed_over: usize,
    /// The request's position in the order of all policies: its arrival, with the head start of its class.
    pub order: (i64, usize),
    /// Number of consecutive steps that were planned without the request, although it was to decode and was first in
    /// `order` among the requests with a slot.
    pub led_in_vain: usize,
    /// The turn in which the mask of the next token is ready. `None` while it is ready.
    pub mask_due: Option<usize>,
    /// Number of rows in flight that continue a late row, whose commit has taken them back.
    pub taken_back: usize,
    /// The reason for which the constraint ends the request, once it is reported.
    pub constraint_end: Option<NotSampled>,
}

impl<'a> Live<'a> {
    pub fn new(request: u64, arrival: &'a Arrival, turn: usize, order: (i64, usize)) -> Self {
        let mut history = History::new();
        arrival.tokens(request).into_iter().for_each(|token| remember(&mut history, token));
        let progress = Progress { generated: arrival.generated, ..Progress::default() };
        Self {
            arrival,
            history,
            committed: progress,
            planned: progress,
            in_flight: 0,
            target: arrival.prefill_tokens(),
            fresh: true,
            slot: None,
            initialised: false,
            poisoned: false,
            cached: None,
            preempted: false,
            cancelled: arrival.cancel.is_some_and(|cancel| cancel < arrival.turn),
            away: arrival.media.map_or(Away::No, |turns| Away::Parked { until: turn + turns }),
            failing: false,
            passed_over: 0,
            order,
            led_in_vain: 0,
            mask_due: arrival.masked.map(|masked| turn + masked.first).filter(|due| *due > turn),
            taken_back: 0,
            constraint_end: None,
        }
    }

    /// Records that the request has lost its pages and its slot.
    pub fn preempt(&mut self) {
        assert_eq!(self.committed, self.planned, "a row is in flight");
        let progress = Progress { computed: 0, ..self.committed };
        (self.committed, self.planned) = (progress, progress);
        (self.fresh, self.initialised, self.slot, self.passed_over) = (true, false, None, 0);
        self.target = self.arrival.prompt_tokens() + progress.generated as usize;
        self.preempted = true;
    }

    /// Counts the positions up to `computed` as computed, although no row of this admission computes them.
    pub fn skip_to(&mut self, computed: usize) {
        (self.committed.computed, self.planned.computed) = (computed, computed);
    }

    /// The walk and the end of the segment that contains the next position to plan. `None` if the next row is a decode.
    pub fn segment(&self) -> Option<(WalkId, usize)> {
        let (mut end, computed) = (0, self.planned.computed);
        let found = self.arrival.prefill.iter().find_map(|&(walk, tokens)| {
            end += tokens;
            (end > computed).then_some((walk, end))
        });
        let last = self.arrival.prefill.last().map_or(AUDIO, |segment| segment.0);
        match found {
            // A preemption lengthens the last segment. If the last segment must not be cut, the preemption adds a text
            // segment after it instead.
            Some((walk, end)) if end == self.arrival.prefill_tokens() && last != AUDIO => {
                Some((walk, self.target))
            }
            Some(found) => Some(found),
            None if computed < self.target && last == AUDIO => Some((TEXT, self.target)),
            None => (computed < self.target).then_some((last, self.target)),
        }
    }

    pub fn is_due(&self, deadline: usize) -> bool {
        self.arrival.deadline.is_some_and(|turn| turn <= deadline)
    }

    /// True if the request's next row can only be a decode.
    pub fn decodes(&self) -> bool {
        self.segment().is_none()
    }

    /// True if the request can have no row beyond those planned so far.
    pub fn is_planned_out(&self) -> bool {
        let prefill_only = self.arrival.role == tutti_scheduler::GraphRole::Prefill;
        self.decodes() && (prefill_only || self.planned.generated >= self.arrival.max_tokens)
    }

    /// The outcome with which the request ends after the commit of a row with this outcome. `None` if the request goes
    /// on.
    pub fn ending(&self, outcome: &RowOutcome) -> Option<Outcome> {
        let generated = self.committed.generated;
        let finished = |reason| Some(Outcome::Finished { reason, generated });
        if self.committed.computed < self.target {
            return None;
        }
        if let RowOutcome::Sampled(token) = *outcome
            && self.arrival.stops
            && generated > self.arrival.min_tokens
        {
            match token {
                EOS => return finished(Finish::EndOfSequence),
                STOP => return finished(Finish::StopToken(STOP)),
                _ => {}
            }
        }
        if generated >= self.arrival.max_tokens { finished(Finish::Length) } else { None }
    }
}
