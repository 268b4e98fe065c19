//! Simulates the engine's masks: those that are ready later, those that come too late for a row, and constraints that
//! end a request.

use tutti_proto::GraphKey;
use tutti_scheduler::{
    ConstraintFailure, FailureCause, Finish, NotSampled, Outcome, Row, RowCommit, RowOutcome,
};

use crate::{Simulation, live::Live};

/// Maximum number of turns for which a mask is made.
pub const LONGEST_MASK: usize = 4;

/// The constraint of a request's output.
#[derive(Clone, Copy, Debug)]
pub struct Masked {
    /// True if the engine makes a mask between two rows in flight.
    pub runs_ahead: bool,
    /// Number of turns until the first mask is ready.
    pub first: usize,
}

impl Live<'_> {
    /// True if no row of the request may be planned, because its mask is not ready, or because it depends on a token
    /// that a row in flight samples.
    pub fn awaits_mask(&self) -> bool {
        let samples = self.planned.generated - self.committed.generated;
        let most = |masked: Masked| if masked.runs_ahead { 2 } else { 1 };
        self.mask_due.is_some() || self.arrival.masked.is_some_and(|masked| samples >= most(masked))
    }
}

impl Simulation<'_> {
    pub fn is_any_mask_due(&self) -> bool {
        self.live.values().any(|live| live.mask_due.is_some())
    }

    /// Plays the events of masks that are due in this turn.
    pub fn play_masks(&mut self) {
        let masked = self.live.iter().filter(|(_, live)| live.arrival.masked.is_some());
        let masked: Vec<GraphKey> = masked.map(|(key, _)| *key).collect();
        for key in masked {
            let (roll, turns) = (self.roll(), self.roll() as usize % LONGEST_MASK);
            let live = self.live.get_mut(&key).expect("it was there");
            match live.mask_due {
                Some(due) if due <= self.turn => {
                    live.mask_due = None;
                    self.scheduler.mask_ready(key);
                }
                None if roll < 6 => {
                    live.mask_due = Some(self.turn + 1 + turns);
                    self.scheduler.await_mask(key);
                }
                _ => {}
            }
            let live = self.live.get_mut(&key).expect("it was there");
            if live.constraint_end.is_none() && roll == 99 {
                live.constraint_end = Some(if turns == 0 {
                    self.scheduler.fail_constraint(key, failure());
                    NotSampled::ConstraintFailed(failure())
                } else {
                    self.scheduler.complete_output(key);
                    NotSampled::Complete
                });
                self.seen.constraint_ends += 1;
            }
        }
    }

    /// True if a row does not run, because it continues one from which no token is sampled.
    pub fn is_void(&self, row: &Row) -> bool {
        row.continues && matches!(self.earlier(row), Some(RowOutcome::NotSampled(_)))
    }

    /// The reason for which no token is sampled from a terminal row that runs. `None` if one is.
    pub fn not_sampled(&mut self, row: &Row) -> Option<NotSampled> {
        self.live[&row.key].arrival.masked?;
        let why = match self.roll() {
            0..8 => NotSampled::Late,
            8 => NotSampled::Complete,
            9 => NotSampled::ConstraintFailed(failure()),
            _ => return None,
        };
        self.seen.not_sampled += 1;
        Some(why)
    }

    /// The outcome of the request's last row in flight.
    fn earlier(&self, row: &Row) -> Option<RowOutcome> {
        self.flying.iter().rev().find_map(|flight| {
            let index = flight.step.rows.iter().position(|other| other.key == row.key)?;
            Some(flight.outcomes[index].clone())
        })
    }

    /// Checks the commit of a row from which no token was sampled. Returns the outcome with which the request ends.
    pub fn check_not_sampled(&mut self, commit: &RowCommit, why: NotSampled) -> Option<Outcome> {
        assert_eq!(commit.sampled, None, "no token was sampled");
        let row = &commit.row;
        let live = self.live.get_mut(&row.key).expect("it has not ended");
        match why {
            NotSampled::Late => {
                // The row is planned again, and every row in flight that continues it counts no longer.
                live.planned = live.committed;
                live.taken_back = live.in_flight;
                assert_eq!(live.planned.computed, row.positions.start);
                live.history.truncate(row.positions.end);
                None
            }
            NotSampled::Void => {
                assert!(live.taken_back > 0, "{} continues no late row", row.key);
                live.taken_back -= 1;
                self.seen.taken_back += 1;
                None
            }
            why => live.ending_by(&why),
        }
    }
}

impl Live<'_> {
    /// The outcome with which the request ends if no token can follow for this reason.
    pub fn ending_by(&self, why: &NotSampled) -> Option<Outcome> {
        match why {
            NotSampled::Late | NotSampled::Void => None,
            NotSampled::Complete => {
                Some(Outcome::Finished { reason: Finish::Complete, generated: self.committed.generated })
            }
            NotSampled::ConstraintFailed(why) => Some(Outcome::ConstraintFailed(why.clone())),
        }
    }

    /// True if the request's last row in flight continues a late one, whose commit has taken both back.
    pub fn is_taken_back(&self) -> bool {
        self.taken_back > 0 && self.taken_back == self.in_flight
    }
}

fn failure() -> ConstraintFailure {
    ConstraintFailure { cause: FailureCause::Constraint, why: "injected".to_owned() }
}
