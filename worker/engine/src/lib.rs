//! Runs step plans on a model and a device.
//!
//! The worker process is I/O around one [`Engine`]. Everything here is synchronous and belongs on a thread of its own:
//!
//! ```ignore
//! pub struct EngineSettings {               // plain data, worker::config makes it
//!     pub max_step_tokens: usize,           // <= the model's Limits::max_step_tokens
//!     pub max_prefill_chunk: Option<usize>, // None: as long as the step's budget
//!     pub max_running_requests: usize,
//!     pub max_waiting_requests: usize,      // beyond it a launch is refused as Overloaded
//!     pub kv_cache_memory: Option<u64>,     // bytes; None: derived, see `kv`
//! }
//!
//! impl Engine {
//!     /// Sizes and allocates the KV pool. Err: a setting at fault, by field.
//!     pub fn new(model: Box<dyn Model>, rank: Rank, settings: &EngineSettings) -> Result<Self, tutti_runtime::Error>;
//!     /// Runs one step of the largest size on the null page. Before `Ready` is sent.
//!     pub fn warm_up(&mut self) -> Result<(), tutti_runtime::Error>;
//!
//!     /// Takes a graph. A refusal is no error here: it is a failed Completion in the next report.
//!     pub fn launch(&mut self, graph: pb::LaunchGraph);
//!     /// Idempotent; may come before the launch. Its Completion is in the next report.
//!     pub fn cancel(&mut self, key: GraphKey);
//!     /// Plans, runs and commits one step. None: nothing to run and nothing to tell; wait for a message.
//!     /// Err: the device is lost, the worker must end (exit 70).
//!     pub fn step(&mut self) -> Result<Option<pb::StepReport>, tutti_runtime::Error>;
//!
//!     pub fn load(&self) -> pb::WorkerLoad;
//!     pub fn is_idle(&self) -> bool;              // no request is held and nothing is left to report
//!     pub fn kv_pages_total(&self) -> u32;        // without the null page: what requests can have
//!     pub fn kv_bytes(&self) -> u64;
//!     pub fn max_request_tokens(&self) -> u32;    // for ModelDescription
//!     pub fn model(&self) -> &dyn Model;          // declaration, limits, weight_bytes, describe
//! }
//! ```
