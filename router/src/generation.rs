//! The core below the HTTP and gRPC surfaces: turns a request into choices (the answers that the request asks for), and
//! each choice into a stream of deltas (new text and tokens).

mod admission;
mod arrival;
mod attempts;
mod choice;
mod conversation;
mod decode;
mod finish;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod generator;
mod media;
mod permits;
mod prompt_logprobs;
mod prompts;
mod reading;
pub mod request;
mod shared_logprobs;
mod stream;
pub mod validate;

pub use admission::Admission;
pub use arrival::Arrival;
pub use choice::{Delta, OutputToken};
pub use conversation::{Conversation, Placeholders};
pub use finish::{CallCounts, Finish, Reason};
pub use generator::Generator;
pub use prompts::{EncodedPrompt, Length, to_tokens};
pub use reading::{Reading, Tool, ToolChoice};
pub use request::{Detail, GenerationRequest, Media, Output, Prompt, Stopping};
pub use stream::{Generation, GenerationInfo, Usage};
