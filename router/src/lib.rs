//! The front door: OpenAI HTTP and gRPC text in, token ids to a conductor, the
//! best of those that it knows. Stateless: it tokenises, applies the chat
//! template, fans choices out, turns tokens back into text, cuts at stop strings, and renders.

mod fleet;
mod front_door;
mod generation;
mod grpc;
mod http;
mod metrics;
pub mod process;
mod served;
mod text;
mod way;

#[cfg(test)]
mod test_support;

pub use fleet::Conductors;
pub use front_door::{FrontDoor, tune};
pub use served::{CheckedText, check_checkpoint};
pub use tutti_settings::{FleetSettings, RouterSettings};
