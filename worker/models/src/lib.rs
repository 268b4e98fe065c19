//! Model families, each written once for all devices, against the [`Device`](tutti_kernels::Device) trait.
//!
//! [`load`] reads an unmodified Hugging Face directory and returns a [`Model`], which hides its family and its device.
//! The table in `families.rs` names the file of each family. That file names the paper and the reference
//! implementation. [`load_sim`] returns a simulated model, which has no weights and whose steps only take time.

mod architecture;
mod audio;
mod config;
mod decoder;
mod deepseek_v4;
mod encoder_weights;
mod encoders;
mod error;
mod expert_loads;
mod experts;
mod families;
mod footprint;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
#[cfg(feature = "hybrid-test-model")]
mod hybrid_test;
mod inspect;
mod llama;
mod load;
pub mod lockstep;
#[cfg(feature = "media-test-model")]
mod media_test;
mod model;
mod preprocessing;
mod quantiser;
mod qwen3_5;
mod rope;
mod shares;
mod sim_device;
mod step_hook;
mod thinker;
mod vision;
mod weights;
mod with_encoders;

pub use error::LoadError;
pub use expert_loads::ExpertLoad;
pub use footprint::Footprint;
pub use inspect::{check_config, footprints};
pub use load::{DecoderDevice, KvCacheDtype, LoadFormat, LoadOptions, load};
pub use model::{EmbeddedRows, EncoderItem, Limits, LogitRequests, LogitResults, Model, WantedRows};
pub use quantiser::{CodeError, ModuleReport, Outcome, QuantiserScheme, Sizes, quantise_checkpoint};
pub use shares::GroupShares;
pub use sim_device::{SimMeter, SimOptions, load as load_sim, load_metered as load_metered_sim};
pub use step_hook::{IdleModel, PausedPages, StepHook};
pub use tutti_kernels::Quantize;
pub use tutti_transfer::{PageLayout, PlaneLayout, PlaneStorage, Section};
pub use weights::LoadProgress;
