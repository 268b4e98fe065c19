//! Runs step plans on a model and a device.
//!
//! The worker process is I/O around one [`Engine`]. By default the engine works on one thread:
//!
//! ```text
//! LaunchGraph ─▶ Engine::launch ┐                 ┌─▶ scheduler.plan()
//! CancelGraph ─▶ Engine::cancel ┼─▶ Engine::step ─┼─▶ model.forward(), enqueue_logits(), collect()
//!                               ┘        │        └─▶ scheduler.commit()
//! StepReport  ◀──────────────────────────┘
//! ```
//!
//! The device may hold several steps in flight (`runner`): while one step computes, the next step is planned and
//! enqueued. A request may have rows in all steps in flight. Each step is planned on the assumption that the rows in
//! flight succeed and end no request. If a request ends nevertheless, its later rows in flight are void: they have no
//! effect. The host may not know the first token of a row yet. Such a row takes the token from its slot on the device.
//!
//! [`Engine::split`] divides the engine in two. The thread of a [`DeviceLoop`] runs the device and plans between two
//! steps. Meanwhile the thread of an [`EngineHandle`] takes launches and makes reports (`overlap`). Results are the
//! same with one thread and with two.
//!
//! A row is one request's share of a step. One report carries the tokens of all rows of a step, and the completions of
//! all graphs that ended with the step. The scheduler counts positions and pages, and decides what runs. The engine
//! holds the tokens and fills the step's host inputs. It asks the model only for the logits of terminal rows, from
//! which tokens are sampled, and of prompt positions whose logprobs are requested. A row of an encoder's walk runs the
//! encoder once, on one media item or on all items that are encoded together. The embeddings go to the engine that
//! prefills the request (`transfer`), which may be the same engine.
//!
//! If a request's output follows a constraint, a pool of threads makes the mask of each of its tokens (`masks`). The
//! logits of a step whose masks depend on a step in flight are enqueued behind that step's commit (`logits`).
//!
//! Errors:
//!
//! - An invalid launch fails its own request (`spec`).
//! - If the device refuses a step, no part of the step has run. Its rows are enqueued one by one, and only rows at
//!   fault fail their requests.
//! - A lost device ends the worker, by an error from [`Engine::step`] or [`DeviceLoop::run`].

mod arrivals;
mod batch;
mod encode;
mod encoder_cache;
mod engine;
mod engine_core;
mod kv;
mod logits;
mod masks;
mod media;
mod observe;
mod overlap;
mod padding;
mod poison;
mod positions;
mod profile;
mod report;
mod reporter;
mod runner;
mod sequence;
mod sequences;
mod spec;
mod step_memory;
mod step_view;
mod transfer;
mod warm_up;

pub use engine::Engine;
pub use engine_core::StepOutput;
pub use kv::{DEFAULT_KV_BYTES, KvSize, kv_budget, least_bytes};
pub use masks::ReadVocabulary;
pub use observe::{RowRecord, StepObserver, StepRecord, StepTimes};
pub use overlap::{DeviceLoop, EngineHandle, Waker};
pub use profile::profile;
pub use step_memory::StepMemory;
pub use step_view::StepView;
pub use tutti_scheduler::{OutputToken, TransferError};
pub use tutti_settings::EngineSettings;
