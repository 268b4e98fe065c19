//! The core below the HTTP and gRPC surfaces: it turns a request into the deltas of its choices.

mod attempts;
mod choice;
mod generator;
mod media;
mod prompt_logprobs;
mod prompts;
pub mod request;
mod stream;
pub mod validate;

pub use choice::{Delta, Finish, OutputToken, Reason};
pub use generator::Generator;
pub use prompts::{EncodedPrompt, to_tokens};
pub use request::{GenerationRequest, Media, Output, Prompt, Sampling, Stopping};
pub use stream::{Generation, Usage};
