//! A gRPC client in Rust: streams the answer to a chat message.
//!
//! Start a cluster with `cargo run --release --bin conductor -- --workers 2`, then run
//! `cargo run --release --example generate -- "What is Tutti?"`.

use std::{error::Error, io::Write};

use clap::Parser;
use tutti_proto::v1::{
    Chat, ChatMessage, GenerateRequest, Sampling, Stopping, generate_request::Prompt,
    inference_client::InferenceClient,
};

/// Streams the answer to a chat message over gRPC.
#[derive(Parser)]
struct Arguments {
    /// The user's message
    #[arg(default_value = "What is Tutti?")]
    message: String,

    /// Address of the gRPC API
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:50051")]
    address: String,

    /// Maximum number of tokens in the answer
    #[arg(long, value_name = "N", default_value_t = 200)]
    max_tokens: u32,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { message, address, max_tokens } = Arguments::parse();
    let messages = vec![ChatMessage { role: "user".into(), content: message }];
    let request = GenerateRequest {
        prompt: Some(Prompt::Chat(Chat { messages })),
        // Temperature 0 always picks the likeliest token, so that every run gives the same answer.
        sampling: Some(Sampling { temperature: Some(0.0), ..Sampling::default() }),
        stopping: Some(Stopping { max_tokens: Some(max_tokens), ..Stopping::default() }),
        ..GenerateRequest::default()
    };

    let mut client = InferenceClient::connect(address).await?;
    let mut responses = client.generate(request).await?.into_inner();
    let mut stdout = std::io::stdout();
    // Each response has the text generated since the previous response. The last response has the token counts.
    while let Some(response) = responses.message().await? {
        write!(stdout, "{}", response.text)?;
        stdout.flush()?;
        if let Some(usage) = response.usage {
            writeln!(stdout)?;
            eprintln!("{} prompt tokens, {} output tokens", usage.prompt_tokens, usage.completion_tokens);
        }
    }
    Ok(())
}
