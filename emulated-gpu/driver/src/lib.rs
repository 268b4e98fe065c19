//! `libcuda.so.1` over the emulated GPU. It has the driver functions that cudarc and NVRTC call.
//!
//! ```text
//! api (C functions) --> context --> queue (streams, events) --> tutti-emulated-gpu (PTX, device memory)
//!                          \--> memory, module, faults
//! exported (for libcublasLt and libnccl) --> context
//! ```
//!
//! A stream is a queue. One thread of the context runs the work of all streams. With a seed, work runs as late as
//! possible: when the host waits for something, or after a few milliseconds. The order between streams is then random
//! where CUDA leaves it open. So a host that reads a result or reuses a staging buffer without a wait finds wrong
//! bytes. `settings.rs` lists the environment's variables.
//!
//! As on a real GPU, an error of a kernel is sticky: every later call of the context returns it.

mod api;
mod context;
mod error;
mod event;
mod exported;
mod faults;
mod handles;
mod host_memory;
mod launch;
mod memory;
mod module;
mod occupancy;
mod queue;
mod random;
mod settings;
mod state;
