//! The micro-scheduler: decides what each step of a worker computes.
//!
//! The scheduler is pure: it does no I/O, reads no clock and knows no device. It counts positions, pages and slots, and
//! compares tokens. Its decisions depend only on the calls made to it. This is one turn of a worker:
//!
//! ```text
//! add(launch) ─▶ waiting ──plan()──▶ running ──commit()──▶ Ending
//!                   ▲           │       ▲ │
//!          preempted└───────────┤       │ │ abort(): as if the step planned last had not been planned
//!                      StepPlan ▼       │ ▼
//!                           the engine ─┘  up to `steps_in_flight` plans, back in their order
//! ```
//!
//! 1. [`Scheduler::plan`] ends requests that are [cancelled](Scheduler::cancel) or cannot meet their deadline, moves
//!    requests from *waiting* to *running* while their pages and slots fit, and packs one [`StepPlan`]. The plan has a
//!    [`Row`] for each request that takes part: the positions it computes, its block table and slot, and [whether a
//!    token is sampled from it](Row::is_terminal).
//! 2. The engine runs the plan. Meanwhile [`Scheduler::plan_ahead`] prepares rows that the next plan is likely to need
//!    (`prepared`). `plan_ahead` never changes what is planned.
//! 3. [`Scheduler::commit`] takes the plan back with an outcome for each row. Requests advance here and nowhere else,
//!    and each request that reaches its end gets its one [`Ending`].
//!
//! With [`steps_in_flight`](SchedulerConfig::steps_in_flight) above 1, plans are made before earlier steps are
//! committed, so that the device never waits for the host. The device runs the steps in the order of their plans:
//! *stream order*.
//!
//! # Invariants
//!
//! - **Every accepted request ends exactly once**, after a number of steps bounded by the work ahead of it. A request
//!   that could never run is refused on arrival by a [`Refusal`] that says what the request would have needed.
//! - **One order for everything**: arrival, with a head start for each priority class ([`HEAD_START`]). Admission and
//!   first-come prefill follow this order, and preemption for pages takes requests from its end. A request's position
//!   in the order never changes, so the first request stays first until it ends, and no request waits for ever.
//! - **Shares are equal.** The order holds among requests of one [share](GraphLaunch::share). If several shares have
//!   requests, a request of the share that was given the fewest tokens is admitted next, and all shares have equal
//!   parts of a step's prefill. If a share has no running request and its first one does not fit, a request of the
//!   share with the most running requests yields. So the requests of one share delay the requests of another share by
//!   no more than the first share's part.
//! - **Decodes first.** A step gives every decoding request its token, then prefills with the rest of
//!   [`max_step_tokens`][budget], [shared][sharing] as configured. Only a prefill that must not be cut exceeds the
//!   budget, and then it runs alone; see [`PATIENCE`]. With a [target] for the time between tokens, prefills that share
//!   a step with decodes get only the time that the decodes leave, as estimated from past steps.
//! - **A walk is identified by its kind** in the model's declaration, never by name. A step whose rows are all decodes
//!   of one walk runs as that decode walk. Any other step runs as the mixed walk that batches its rows. Each row keeps
//!   its own walk. Requests whose walks are batched by different mixed walks take turns.
//! - **A token is sampled from each terminal row, and from no other row.** A row is terminal if it is a decode or
//!   computes the last position of the prefill. Once no more output is wanted, no row is terminal. The prefill includes
//!   output of earlier incarnations, and all tokens that a preempted request had sampled.
//! - **Memory first.** A request runs only once it holds a slot and the pages of its whole prefill. By default
//!   ([`Admission`][admission]) the request must also hold the pages of its longest possible output, so that a running
//!   request never waits for a page. A request has a slot even if the model has no planes in slots: the slot is the
//!   request's index on the device.
//! - **A full, computed page can be shared** with requests whose tokens are equal up to the page's end. Each request
//!   that reads a page holds it. A page that no request holds is kept until it is needed for other content; the page
//!   idle for longest is taken first.
//! - **An equal start is computed once.** If a running request is about to compute the next blocks of a waiting
//!   request, the waiting request waits for these blocks. Meanwhile it holds nothing and delays no other request. It
//!   waits only for requests that are earlier in order.
//! - **A slot's state cannot be shared, only copied.** If the model has planes in slots, a prefix from the cache ends
//!   with a *snapshot*: a slot with the state behind a block. The first row of an incarnation comes with a copy of the
//!   snapshot, or of the initial state, to the request's slot. Prefills stop at the rungs of a ladder (`snapshots`),
//!   where the next row comes with a save. The snapshot can be found once the step of the save is committed, unless the
//!   request has ended before. Snapshots use only slots that no request needs. Evicting a page drops its snapshot;
//!   evicting a snapshot keeps its page. Without planes in slots, no slot is copied.
//! - **A request may be in several steps in flight.** Each row is planned from the progress that the rows before it
//!   will have made. A decode [continues](Row::continues) a row in flight if that row samples its first token. No row
//!   is planned beyond `max_tokens`.
//! - **A request ends at once**, even with rows in flight: at the commit that ends it, or at the next plan if it is
//!   cancelled, misses its deadline, or its transfer has failed. Its rows in flight are [void](RowCommit::is_void):
//!   their outcomes have no effect.
//! - **Planes in use are never given away.** The pages and the slot of an ended request, the slot of a save, and the
//!   snapshot that a request begins from are kept until no uncommitted step uses them. Stream order alone would allow
//!   earlier reuse, but transfers read and write pages and slots outside of stream order. Slot copies rely on stream
//!   order: a save may read what an earlier step in flight writes. A request with rows in flight is not preempted; it
//!   is left out of steps until its rows are back.
//! - **An aborted step leaves no trace.** Only the step planned last can be aborted, together with its slot copies. A
//!   request whose first row is aborted begins in a later step. A save that is aborted is planned again with its row.
//! - **A masked token waits for its mask.** The mask of each token of a [masked](GraphLaunch::is_masked) request
//!   depends on the token before it, so the request has one row in flight from which a token is sampled, or two if the
//!   engine makes the second one's mask [between them](Scheduler::run_ahead). A request is left out of steps while its
//!   next mask is [not ready](Scheduler::await_mask). A row whose mask [is late](NotSampled::Late) has no effect and is
//!   planned again, and a row in flight that continues it [is void](NotSampled::Void).
//! - **A request may be disaggregated** ([`GraphRole`]): one worker prefills it while another holds pages for it and
//!   then decodes it. A request that waits for planes, or whose planes are being copied, is part of no step and is
//!   never preempted. The other worker sends the slot's state, so that known pages need no snapshot. Like any other
//!   request it can be cancelled, miss its deadline or [fail](Scheduler::fail_transfer). A request that waits for
//!   embeddings of its media holds nothing, and no other request waits for it.
//!
//! # Modules
//!
//! - `scheduler`: the turn above. Its submodules: `expiry` ends requests, `memory` admits and preempts them, `yielding`
//!   preempts one for a share without a running request, `disaggregated` completes transfers, and `masked` leaves
//!   out requests whose masks are not ready.
//! - `launch`: the requests that arrive; `validate`: the checks on arrival; `admission`: the resources that a request
//!   must hold; `request`: the states of a request.
//! - `shares`: the share that is next; `waiting`: the requests that wait for pages.
//! - `following`: the requests that wait while another request computes an equal start.
//! - `packing`: the policy of a step; `pace` and `step_time`: the prefill that a step has time for; `least_time`: the
//!   proof that a deadline cannot be met; `prepared`: rows made before their step is planned.
//! - [`pages`]: the pool of pages and its block tables; `slots`: the pool of slots; `holding`: both together; `prefix`:
//!   the content of pages; `snapshots`: the positions at which slots are saved.
//! - `stopping`: the end of an output; `tokens`: a request's tokens.
//!
//! [budget]: tutti_settings::EngineSettings::max_step_tokens
//! [sharing]: tutti_settings::PrefillSharing
//! [target]: tutti_settings::EngineSettings::target_itl_ms
//! [admission]: tutti_settings::Admission

mod admission;
mod config;
mod following;
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
mod shares;
mod slots;
mod snapshots;
mod step;
mod step_time;
mod stopping;
mod ticket;
mod tokens;
mod validate;
mod waiting;
mod walks;

pub use config::{ConfigError, SchedulerConfig};
pub use launch::{Content, GraphLaunch, GraphRole, HEAD_START, MAX_PRIORITY, MediaMark, Refusal, Segment};
pub use pace::MEASURED_EVERY;
pub use packing::PATIENCE;
pub use scheduler::{Load, Scheduler, Tally};
pub use shares::ShareId;
pub use step::{
    ConstraintFailure, Ending, FailureCause, NotSampled, Outcome, OutputToken, Reserved, Row, RowCommit,
    RowOutcome, StepPlan, Terminality, TransferError, Turn,
};
pub use stopping::{Finish, Stopping};
pub use tokens::Tokens;
pub use tutti_planes::{PageId, SlotCopy, SlotId};
