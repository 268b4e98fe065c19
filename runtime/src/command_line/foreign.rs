//! Flags of vLLM and SGLang that this build does not have, and what takes their place. docs/coming-from-vllm.md has
//! them with those that both have; a test compares the two.

use super::processes::{CONDUCTOR, DRAIN, KERNELS, QUANTIZE, STATUS, TRACE};

/// Flags of other servers, without their leading hyphens, and a hint for those who type them.
const FLAGS: &[(&[&str], &str)] = &[
    (
        &["tensor-parallel-size", "tp-size", "tensor-parallel"],
        "--tp T divides one model among T workers; with --workers N there are N/T replicas",
    ),
    (
        &["data-parallel-size", "dp-size"],
        "--workers N starts N workers, each with the whole model unless --tp divides it",
    ),
    (
        &["enable-expert-parallel", "ep-size", "expert-parallel-size"],
        "--ep, with --tp, gives each rank whole experts",
    ),
    (&["pipeline-parallel-size", "pp-size"], "there are no pipelines of layers: --tp divides each layer"),
    (&["port"], "--http IP:PORT has address and port, as in --http 127.0.0.1:8000 or --http 8000"),
    (&["host"], "--http IP:PORT has address and port, as in --http 0.0.0.0:8000"),
    (&["model-path"], "--model has the folder or the hub id"),
    (&["dtype"], "weights keep the type that they are stored in; --quantize int8 makes them smaller"),
    (
        &["gpu-memory-utilization", "mem-fraction-static"],
        "--kv-cache-memory SIZE is a number of bytes, such as 8GiB; without it, planes take what is free",
    ),
    (&["max-num-seqs"], "--max-running-requests limits the requests that one worker runs at a time"),
    (&["max-num-batched-tokens", "chunked-prefill-size"], "--max-step-tokens is the budget of one step"),
    (&["context-length"], "--max-model-len limits prompt and output of one request together"),
    (
        &["quantization"],
        "--quantize int8 or int4 quantises weights at the start; checkpoints that are quantised are not read",
    ),
    (&["api-key"], "--api-key-file FILE has the names, hashes and limits of keys: docs/security.md"),
    (&["tokenizer", "tokenizer-path"], "the tokenizer is tokenizer.json in the folder of --model"),
    (&["chat-template"], "the template is chat_template.jinja in the folder of --model"),
    (&["trust-remote-code"], "no code of a checkpoint is run; leave it out"),
    (&["download-dir"], "the variable HF_HUB_CACHE names the folder of downloads"),
    (&["revision"], "the revision is main; --model takes a folder with another one"),
    (&["enable-chunked-prefill"], "prompts are always cut into chunks, unless --chunking off; leave it out"),
    (&["scheduling-policy", "enable-priority-scheduling"], "each request has a `priority`; leave it out"),
    (&["enable-prefix-caching"], "prefixes are always cached, unless --no-prefix-cache; leave it out"),
    (&["no-enable-prefix-caching", "disable-radix-cache"], "--no-prefix-cache keeps no pages of prefixes"),
    (&["ssl-certfile"], "--tls-cert FILE has the chain of the certificate"),
    (&["ssl-keyfile"], "--tls-key FILE has the key of --tls-cert"),
    (&["allowed-origins"], "a file of --config has allowed_origins in its table [router]: docs/security.md"),
    (
        &["max-logprobs"],
        "a file of --config has max_output_logprobs and max_prompt_logprobs in its table [router]",
    ),
    (
        &["kv-transfer-config", "disaggregation-mode"],
        "--topology FILE has groups that prefill and groups that decode: docs/topologies.md",
    ),
    (&["otlp-traces-endpoint"], "--otlp-endpoint has the URL of the collector"),
    (&["seed", "random-seed"], "each request has a `seed`; leave it out"),
    (&["log-level", "uvicorn-log-level"], "--log has the filter of log lines, such as info"),
    (&["enforce-eager", "disable-cuda-graph"], "there are no graphs of CUDA to turn off; leave it out"),
    (
        &["swap-space", "cpu-offload-gb"],
        "neither weights nor pages leave the device; --quantize int8 makes weights smaller",
    ),
    (&["enable-lora", "lora-paths"], "adapters are not served: merge one into its base model"),
    (&["speculative-config", "speculative-algorithm"], "there is no speculative decoding"),
    (
        &["tool-call-parser"],
        "--tool-parser has the format of tool calls; by default, the chat template shows it",
    ),
    (
        &["enable-auto-tool-choice"],
        "tools are served wherever the chat template shows their format; leave it out",
    ),
];

/// Commands of other servers that come before a model.
const COMMANDS: [&str; 3] = ["serve", "launch_server", "api_server"];

/// Returns a hint for a flag of another server, by its name with or without hyphens, or with underscores, as in a file.
pub fn of_flag(name: &str) -> Option<&'static str> {
    let name = name.trim_start_matches('-').replace('_', "-");
    let name = name.split('=').next().unwrap_or_default();
    FLAGS.iter().find(|(names, _)| names.contains(&name)).map(|(_, hint)| *hint)
}

/// Returns a hint for an argument that is no flag. `follows` is the argument after it.
pub fn of_value(value: &str, follows: Option<&str>) -> String {
    if COMMANDS.contains(&value) {
        let model = follows.filter(|next| !next.starts_with('-')).unwrap_or("MODEL");
        return format!("there is no command {value}: a model is given as --model {model}");
    }
    let command = format!("{} {value}", CONDUCTOR.name);
    if [STATUS, DRAIN, TRACE, QUANTIZE, KERNELS].iter().any(|process| process.name == command) {
        return format!("a command comes first, as in `{command}`");
    }
    if value.parse::<f64>().is_ok() || ["true", "false", "on", "off", "yes", "no"].contains(&value) {
        return format!("{value} belongs to no flag: a switch takes no value, and any other flag takes one");
    }
    format!("a model is given as --model {value}")
}

#[cfg(test)]
mod tests;
