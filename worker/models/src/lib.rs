//! Model families, written once against the device seam.
//!
//! [`load`] reads an unmodified Hugging Face directory and gives back a [`Model`]; which family it is, and which device
//! runs it, shows no further. Each family has a folder of its own whose header names the paper and the reference.

mod config;
mod error;
mod load;
pub mod lockstep;
#[cfg(feature = "media-test-model")]
mod media_test;
mod model;
mod pages;
mod qwen3;
mod rope;
mod sim_device;
mod step_hook;
mod thinker;
mod weights;

pub use error::LoadError;
pub use load::{LoadFormat, LoadOptions, load};
pub use model::{EmbeddedRows, Limits, LogitRequests, LogitResults, Model};
pub use pages::PageLayout;
pub use sim_device::load as load_sim;
pub use step_hook::{PausedPages, StepHook};
pub use tutti_kernels::Quantize;
pub use weights::LoadProgress;
