//! The micro-scheduler: decides what each step of a worker computes.
//!
//! It is pure. It does no I/O, reads no clock and knows no device: it counts positions and pages, compares tokens, and
//! what it decides is a function of the calls made to it. One turn of a worker is
//!
//! ```text
//! add(launch) ─▶ waiting ──plan()──▶ running ──commit()──▶ Ending
//!                   ▲           │       ▲ │
//!          preempted└───────────┤       │ │ abort(): as if the step had not been planned
//!                      StepPlan ▼       │ ▼
//!                           the engine ─┘
//! ```
//!
//! 1. [`Scheduler::plan`] ends what was [cancelled](Scheduler::cancel) or cannot meet its deadline, moves requests from
//!    *waiting* to *running* while their pages fit, and packs one [`StepPlan`]: a [`Row`] for each request that takes part,
//!    with the positions it computes, its block table, and whether it is terminal ([`Terminality`]).
//! 2. The engine runs the plan.
//!    Meanwhile [`Scheduler::plan_ahead`] makes the rows ready that the next plan is likely to need (`ahead`); it never
//!    changes what is planned.
//! 3. [`Scheduler::commit`] takes it back with an outcome for each row. Only now do requests advance, and those that
//!    reached their end get their one [`Ending`].
//!
//! # What it holds to
//!
//! - **Every accepted request ends once**, in a number of steps bounded by what is ahead of it. What could never run is
//!   refused at the door by a [`Refusal`] that says what would have been needed.
//! - **One order for everything**: arrival, with a head start for each priority class ([`HEAD_START`]). Admission goes by
//!   it, first-come prefill goes by it, and preemption takes from its end. It never changes, so whoever is first stays
//!   first and ends, and nobody waits for ever.
//! - **Decodes first.** A step gives every decoding request its token, then prefills what is left of
//!   [`max_step_tokens`](SchedulerConfig::max_step_tokens), [shared](PrefillSharing) as configured. Only a prefill
//!   that must not be cut exceeds the budget, and then runs alone; see [`PATIENCE`]. With a
//!   [target](SchedulerConfig::target_itl) for the time between tokens, prefill beside decodes gets the time that a model
//!   of past steps says they leave.
//! - **A walk is told by its kind** in the model's declaration, never by name. A step of decodes alone is labelled
//!   with the decode walk, any other with the mixed walk that batches its rows; each row keeps its own walk. Partitions,
//!   whose rows no mixed walk batches together, take turns.
//! - **A row is terminal** when it computes the last position there is and output is still wanted. "Last" is measured
//!   against all that the prefill must compute: output of earlier incarnations is part of it, and so is all that a
//!   preempted request had sampled.
//! - **Memory first.** A request runs only once it holds the pages of its whole prefill, and by default
//!   ([`Admission`]) for all it may become, so that nothing that runs waits for a page.
//! - **A page that is whole and computed can be shared** with requests whose tokens are the same up to its end. Only its
//!   readers hold it; when there are none it is kept until its place is needed, the longest unused first.
//!
//! - **A request may be divided** ([`GraphRole`]): one worker prefills it, another holds pages for it meanwhile and decodes it.
//!   The scheduler knows who waits for planes and who waits until they are copied; none of these is part of a step or
//!   gives up its pages, and each is cancelled, late or [failed](Scheduler::fail_transfer) like any other. Who waits for
//!   embeddings of its media holds nothing yet, and nobody waits for it.
//!
//! # Where things are
//!
//! `scheduler` is the turn above; `door` what is refused; `admission` what a request must hold; `packing` the policy of
//! a step, `pace` how much prefill it has time for and `step_time` what is known of that; `least_time` what shows that a
//! deadline cannot be met; `ahead` what is ready of the next step; `request` the states of one request; `divided`, of the
//! scheduler and of a request, what becomes of those that run here in part; [`pages`] the pool and its block tables, `prefix`
//! what they hold; `stopping` when output ends.

mod admission;
mod ahead;
mod config;
mod launch;
mod least_time;
mod pace;
mod packing;
pub mod pages;
mod prefix;
mod request;
mod scheduler;
mod step;
mod step_time;
mod stopping;
mod validate;
mod walks;

pub use config::{Admission, Chunking, ConfigError, PrefillSharing, SchedulerConfig};
pub use launch::{Content, GraphLaunch, GraphRole, HEAD_START, MAX_PRIORITY, MediaMark, Refusal, Segment};
pub use packing::PATIENCE;
pub use pages::PageId;
pub use scheduler::{Load, Scheduler, Tally};
pub use step::{
    Ending, Outcome, OutputToken, Reserved, Row, RowCommit, RowOutcome, StepPlan, Terminality, TransferError,
    Turn,
};
pub use stopping::{Finish, Stopping};
