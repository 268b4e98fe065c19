//! Runs step plans on a model and a device.
//!
//! The worker process is I/O around one [`Engine`]. By itself it does everything on one thread:
//!
//! ```text
//! LaunchGraph ─▶ Engine::launch ┐                 ┌─▶ scheduler.plan()
//! CancelGraph ─▶ Engine::cancel ┼─▶ Engine::step ─┼─▶ model.forward(), model.read_logits()
//!                               ┘        │        └─▶ scheduler.commit()
//! StepReport  ◀──────────────────────────┘
//! ```
//!
//! [`Engine::split`] makes two halves of it: a [`DeviceLoop`], whose thread runs the device and decides between two steps, and
//! a [`EngineHandle`], which does the rest beside it (`overlap`). What is decided and what is computed are the same.
//!
//! One report carries what all rows of a step emitted, and the completions of all graphs that ended with it. The
//! scheduler counts positions and pages and decides; the engine holds the tokens and applies: it fills the step's host
//! inputs, asks the model for logits of terminal rows and of prompt positions whose logprobs are wanted, and for no
//! others. Rows of an encoder's walk run by themselves, item by item; what they give goes to whoever prefills the request
//! (`exchange`), also where that is this engine.
//!
//! Errors: what a request asks for wrongly fails that request (`spec`); the rows of a step that the device refuses run
//! again one by one, and requests whose rows fail alone fail; a lost device ends the worker, by an error from [`Engine::step`] or [`DeviceLoop::run`].

mod arrivals;
mod batch;
mod beside;
mod courier;
mod engine_core;
mod engine;
mod exchange;
mod kv;
mod media;
mod observe;
mod overlap;
mod report;
mod reporter;
mod runner;
mod sequence;
mod settings;
mod spec;
mod step_memory;
mod warm_up;

pub use courier::{Arrival, Cargo, Courier, ImportRequest, ExportSummary, PageRun};
pub use engine_core::StepOutput;
pub use engine::Engine;
pub use kv::{DEFAULT_KV_BYTES, kv_pages};
pub use observe::{RowRecord, StepObserver, StepRecord, StepTimes};
pub use overlap::{Waker, EngineHandle, DeviceLoop};
pub use settings::{Chunking, EngineSettings};
pub use step_memory::StepMemory;
pub use tutti_scheduler::{Admission, OutputToken, PrefillSharing, TransferError};
