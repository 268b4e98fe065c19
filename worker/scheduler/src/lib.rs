//! The micro-scheduler: decides what each step of a worker computes.
//!
//! It is pure. It does no I/O, reads no clock, knows no device and holds no token: it counts positions and pages, and
//! what it decides is a function of the calls made to it. One turn of a worker is
//!
//! ```text
//! add(launch) ─▶ waiting ──plan()──▶ running ──commit()──▶ Ending
//!                               │       ▲ │
//!                      StepPlan ▼       │ │ abort(): as if the step had not been planned
//!                           the engine ─┘ ▼
//! ```
//!
//! 1. [`Scheduler::plan`] ends what was [cancelled](Scheduler::cancel), moves requests from *waiting* to *running* while
//!    their pages fit, and packs one [`StepPlan`]: a [`Row`] for each request that takes part, with the positions it
//!    computes, its block table, and whether it is terminal ([`Terminality`]).
//! 2. The engine runs the plan.
//! 3. [`Scheduler::commit`] takes it back with an outcome for each row. Only now do requests advance, and those that
//!    reached their end get their one [`Ending`].
//!
//! # What it holds to
//!
//! - **Every accepted request ends once**, in a number of steps bounded by what is ahead of it. What could never run is
//!   refused at the door by a [`Refusal`] that says what would have been needed.
//! - **Decodes first.** A step gives every decoding request its token, then prefills what is left of
//!   [`max_step_tokens`](SchedulerConfig::max_step_tokens) in order of arrival. Only an atomic segment larger than that
//!   exceeds it, and then runs alone; see [`ATOMIC_PATIENCE`].
//! - **A walk is told by its kind** in the model's declaration, never by name. A step of decodes alone is labelled
//!   with the decode walk, any other with the mixed walk; each row keeps its own walk.
//! - **A row is terminal** when it computes the last position there is and output is still wanted. "Last" is measured
//!   against all that the prefill must compute, output of earlier incarnations included.
//! - **Memory first.** A request runs only once it holds the pages for all it may become, so nothing that runs ever
//!   waits for a page.
//!
//! # Where things are
//!
//! `scheduler` is the turn above; `door` what is refused; `admission` what a request must hold; `packing` the policy of
//! a step; `request` the states of one request; [`pages`] the pool and its block tables; `stopping` when output ends.

mod admission;
mod config;
mod door;
mod launch;
mod packing;
pub mod pages;
mod request;
mod scheduler;
mod step;
mod stopping;
mod walks;

pub use config::{ConfigError, SchedulerConfig};
pub use launch::{GraphLaunch, Refusal, Segment};
pub use packing::ATOMIC_PATIENCE;
pub use pages::PageId;
pub use scheduler::{Load, Scheduler};
pub use step::{Ending, Outcome, OutputToken, Row, RowCommit, RowOutcome, StepPlan, Terminality, Turn};
pub use stopping::{Finish, Stopping};
