//! The executables, as `--help` describes them.

use super::Process;

/// The conductor.
pub const CONDUCTOR: Process = Process {
    name: "conductor",
    about: "Serves a model with one conductor, its workers, and a router in front. Commands: `conductor status`, \
            `conductor drain` and `conductor trace` call a running conductor, `conductor quantize` writes a quantised \
            checkpoint, and `conductor kernels` compiles GPU kernels ahead of time; each has its own --help.",
    example: ("max_step_tokens", "256"),
    prints_config: true,
    positional: None,
    serves_models: true,
};

/// The command of the conductor that compiles kernels.
pub const KERNELS: Process = Process {
    name: "conductor kernels",
    about: "Compiles the kernels of NVIDIA GPUs ahead of time. Needs libnvrtc.so.13, and no GPU.",
    example: ("out", "\"kernels\""),
    prints_config: false,
    positional: None,
    serves_models: false,
};

/// The command of the conductor that quantises a checkpoint.
pub const QUANTIZE: Process = Process {
    name: "conductor quantize",
    about: "Reads a checkpoint and writes it with matrices of four or eight bits, in the form of compressed-tensors. \
            Prints the error of each matrix.",
    example: ("scheme", "\"int4\""),
    prints_config: false,
    positional: None,
    serves_models: false,
};

/// The command that reports on a running conductor.
pub const STATUS: Process = Process {
    name: "conductor status",
    about: "Prints the workers and the queue of a running conductor.",
    example: ("conductor", "\"http://10.0.0.1:50052\""),
    prints_config: false,
    positional: None,
    serves_models: false,
};

/// The command that drains a worker or a conductor.
pub const DRAIN: Process = Process {
    name: "conductor drain",
    about: "Drains a worker, or a conductor with its workers, and waits for the end.",
    example: ("timeout", "60"),
    prints_config: false,
    positional: None,
    serves_models: false,
};

/// The command that prints the life of a request.
pub const TRACE: Process = Process {
    name: "conductor trace",
    about: "Prints the life of one of the last requests of a running conductor. Chunks of prefill are kept for a minute \
            after each call.",
    example: ("conductor", "\"http://10.0.0.1:50052\""),
    prints_config: false,
    positional: Some("request"),
    serves_models: false,
};

/// The router.
pub const ROUTER: Process = Process {
    name: "router",
    about: "Serves the OpenAI HTTP API and the gRPC API in front of conductors that run elsewhere.",
    example: ("drain_timeout", "60"),
    prints_config: true,
    positional: None,
    serves_models: false,
};

/// A worker.
pub const WORKER: Process = Process {
    name: "worker",
    about: "Joins a cluster as one more worker. Its conductor sends it the model and all other settings.",
    example: ("rank", "2"),
    prints_config: false,
    positional: None,
    serves_models: false,
};
