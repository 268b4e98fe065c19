//! The targets by name. The files of a corpus begin with a byte that selects one of a target's kinds of input.

use prost::Message;
use tutti_proto::v1;
use tutti_router::fuzzing::Outputs;

use crate::{cluster, config, input::Input, media, safetensors, tool_parser};

/// A fuzz target.
#[derive(Clone, Copy)]
pub struct Target {
    name: &'static str,
    run: fn(&[u8]),
}

const TARGETS: [Target; 17] = [
    Target { name: "http", run: http },
    Target { name: "grpc", run: grpc },
    Target { name: "cluster", run: cluster::run },
    Target { name: "safetensors", run: safetensors::run },
    Target { name: "quantised", run: safetensors::quantised },
    Target { name: "gguf", run: safetensors::gguf },
    Target { name: "config", run: config::run },
    Target { name: "template", run: template },
    Target { name: "stop", run: stop },
    Target { name: "schema", run: schema },
    Target { name: "tool-parser", run: tool_parser::run },
    Target { name: "jpeg", run: media::picture },
    Target { name: "png", run: media::picture },
    Target { name: "webp", run: media::picture },
    Target { name: "wav", run: media::recording },
    Target { name: "mp3", run: media::recording },
    Target { name: "flac", run: media::recording },
];

/// Memory that an input of any length may use, in bytes.
const BASE_BYTES: usize = 16 << 20;
/// Targets that need more, with their bytes: the lexers of constraints have up to 50,000 states, and media take what
/// their budget has.
const MORE_BYTES: [(&str, usize); 7] = [
    ("schema", 256 << 20),
    ("jpeg", media::MEMORY),
    ("png", media::MEMORY),
    ("webp", media::MEMORY),
    ("wav", media::MEMORY),
    ("mp3", media::MEMORY),
    ("flac", media::MEMORY),
];

impl Target {
    /// Returns the target of this name.
    pub fn named(name: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| target.name == name)
    }

    /// Returns the names of all targets, for an error message.
    pub fn names() -> String {
        TARGETS.map(|target| target.name).join(", ")
    }

    /// Memory that an input of any length may use, in bytes.
    pub(crate) fn base_bytes(&self) -> usize {
        let more = MORE_BYTES.iter().find(|(name, _)| *name == self.name);
        more.map_or(BASE_BYTES, |(_, bytes)| *bytes)
    }

    /// Runs one input of this target.
    pub fn run(&self, data: &[u8]) {
        (self.run)(data);
    }
}

/// Input: a byte for the route, and a request body.
fn http(data: &[u8]) {
    let Some((route, body)) = data.split_first() else { return };
    for spec in tutti_router::fuzzing::http_body(*route, body) {
        tutti_conductor::fuzzing::takes(&spec, &tutti_router::fuzzing::model());
    }
}

/// Input: the call's timeout, and an encoded message.
fn grpc(data: &[u8]) {
    let mut input = Input(data);
    let timeout = input.piece();
    let Ok(message) = v1::GenerateRequest::decode(input.0) else { return };
    let again = v1::GenerateRequest::decode(&*message.encode_to_vec()).expect("what was encoded is decoded");
    // A message with a NaN does not equal its own copy.
    if again == again.clone() {
        assert_eq!(again, message);
    }
    for spec in tutti_router::fuzzing::grpc_message(message, timeout) {
        tutti_conductor::fuzzing::takes(&spec, &tutti_router::fuzzing::model());
    }
}

/// Input: a byte of options, a template, its variables, and messages.
fn template(data: &[u8]) {
    let mut input = Input(data);
    let (flags, source, variables) = (input.byte(), input.piece(), input.piece());
    let mut messages = Vec::new();
    while !input.is_empty() && messages.len() < 16 {
        messages.push((input.text(), input.text()));
    }
    tutti_router::fuzzing::chat_template(source, variables, &messages, flags);
}

/// Input: a byte of options, the stop strings, the number of tokens in each event of the stream, and one byte per
/// token.
fn stop(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.byte();
    let count = input.byte() % 5;
    let stops = (0..count).map(|_| input.text().to_owned()).filter(|stop| !stop.is_empty()).collect();
    let events = input.piece().to_vec();
    let ids = input.0.iter().take(512).map(|&byte| if byte == 255 { 260 } else { byte.into() }).collect();
    tutti_router::fuzzing::stop_strings(&Outputs { stops, ids, events, flags });
}

/// Input: a byte for the name of the constraint, its text, and one byte per token of an output.
fn schema(data: &[u8]) {
    let mut input = Input(data);
    let (name, text) = (input.byte(), input.text());
    tutti_router::fuzzing::constraint(name, text, input.0);
}
