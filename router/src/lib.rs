//! The front door: clients send text over OpenAI HTTP or gRPC, and the router sends token ids to the best conductor.
//!
//! The router is stateless. It tokenises, applies the chat template, submits each choice (one of the answers that a
//! request asks for) to a conductor, turns tokens back into text, cuts at stop strings, and writes the response.

mod access;
mod bound;
mod conductor_channel;
mod constraints;
mod fair_queue;
mod fleet;
mod front_door;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod generation;
mod grpc;
mod history;
mod http;
mod keys;
mod metrics;
mod page;
pub mod process;
mod readers;
mod served;
mod text;
mod uploads;
mod work_lane;

#[cfg(any(test, feature = "fuzzing"))]
#[allow(clippy::unwrap_used)]
mod test_support;

pub use fleet::{Access, Conductors};
pub use front_door::{FrontDoor, tune};
pub use keys::check_api_keys;
pub use served::{CheckedText, check_checkpoint};
pub use tutti_settings::{FleetSettings, RouterSettings};
