//! The micro-scheduler: decides what each step of a worker computes.
//!
//! The scheduler is pure: it does no I/O, reads no clock and knows no device. It counts positions and pages and
//! compares tokens. Its decisions depend only on the calls made to it. One turn of a worker:
//!
//! ```text
//! add(launch) ─▶ waiting ──plan()──▶ running ──commit()──▶ Ending
//!                   ▲           │       ▲ │
//!          preempted└───────────┤       │ │ abort(): as if the step had not been planned
//!                      StepPlan ▼       │ ▼
//!                           the engine ─┘
//! ```
//!
//! 1. [`Scheduler::plan`] ends requests that are [cancelled](Scheduler::cancel) or cannot meet their deadline, moves
//!    requests from *waiting* to *running* while their pages fit, and packs one [`StepPlan`]. The plan has a [`Row`]
//!    for each request that takes part: the positions it computes, its block table, and [whether a token is sampled
//!    from it](Row::is_terminal).
//! 2. The engine runs the plan. Meanwhile [`Scheduler::plan_ahead`] prepares rows that the next plan is likely to need
//!    (`prepared`). `plan_ahead` never changes what is planned.
//! 3. [`Scheduler::commit`] takes the plan back with an outcome for each row. Requests advance here and nowhere else,
//!    and each request that reaches its end gets its one [`Ending`].
//!
//! # Invariants
//!
//! - **Every accepted request ends exactly once**, after a number of steps bounded by the work ahead of it. A request
//!   that could never run is refused on arrival by a [`Refusal`] that says what the request would have needed.
//! - **One order for everything**: arrival, with a head start for each priority class ([`HEAD_START`]). Admission and
//!   first-come prefill follow this order, and preemption takes requests from its end. A request's position in the
//!   order never changes, so the first request stays first until it ends, and no request waits for ever.
//! - **Decodes first.** A step gives every decoding request its token, then prefills with the rest of
//!   [`max_step_tokens`][budget], [shared][sharing] as configured. Only a prefill that must not be cut exceeds the
//!   budget, and then it runs alone; see [`PATIENCE`]. With a [target] for the time between tokens, prefills that share
//!   a step with decodes get only the time that the decodes leave, as estimated from past steps.
//! - **A walk is identified by its kind** in the model's declaration, never by name. A step whose rows are all decodes
//!   of one walk runs as that decode walk. Any other step runs as the mixed walk that batches its rows. Each row keeps
//!   its own walk. Requests whose walks are batched by different mixed walks take turns.
//! - **A row is terminal**, so that a token is sampled from it, if it is a decode or computes the last position of the
//!   prefill. Once no more output is wanted, no row is terminal. The prefill includes output of earlier incarnations,
//!   and all tokens that a preempted request had sampled.
//! - **Memory first.** A request runs only once it holds the pages of its whole prefill. By default
//!   ([`Admission`][admission]) the request must also hold the pages of its longest possible output, so that a running
//!   request never waits for a page.
//! - **A full, computed page can be shared** with requests whose tokens are equal up to the page's end. Each request
//!   that reads a page holds it. A page that no request holds is kept until it is needed for other content; the page
//!   idle for longest is taken first.
//! - **A request may be disaggregated** ([`GraphRole`]): one worker prefills it while another holds pages for it and
//!   then decodes it. A request that waits for planes, or whose planes are being copied, is part of no step and is
//!   never preempted. Like any other request it can be cancelled, miss its deadline or
//!   [fail](Scheduler::fail_transfer). A request that waits for embeddings of its media holds nothing, and no other
//!   request waits for it.
//!
//! # Modules
//!
//! - `scheduler`: the turn above. Its submodules: `expiry` ends requests, `memory` admits and preempts them, and
//!   `disaggregated` completes transfers.
//! - `launch`: the requests that arrive; `validate`: the requests that are refused; `admission`: the resources that a
//!   request must hold; `request`: the states of a request.
//! - `packing`: the policy of a step; `pace` and `step_time`: the prefill that a step has time for; `least_time`: the
//!   proof that a deadline cannot be met; `prepared`: rows made before their step is planned.
//! - [`pages`]: the pool and its block tables; `prefix`: the content of pages; `stopping`: the end of an output.
//!
//! [budget]: tutti_settings::EngineSettings::max_step_tokens
//! [sharing]: tutti_settings::PrefillSharing
//! [target]: tutti_settings::EngineSettings::target_itl_ms
//! [admission]: tutti_settings::Admission

mod admission;
mod checkpoints;
mod config;
mod holding;
mod launch;
mod least_time;
mod pace;
mod packing;
pub mod pages;
mod prefix;
mod prepared;
mod request;
mod scheduler;
mod slots;
mod step;
mod step_time;
mod stopping;
mod validate;
mod walks;

pub use config::{ConfigError, SchedulerConfig};
pub use launch::{Content, GraphLaunch, GraphRole, HEAD_START, MAX_PRIORITY, MediaMark, Refusal, Segment};
pub use packing::PATIENCE;
pub use pages::PageId;
pub use scheduler::{Load, Scheduler, Tally};
pub use slots::{SlotCopy, SlotId};
pub use step::{
    Ending, Outcome, OutputToken, Reserved, Row, RowCommit, RowOutcome, StepPlan, Terminality, TransferError,
    Turn,
};
pub use stopping::{Finish, Stopping};
