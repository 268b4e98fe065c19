//! The executables, as `--help` describes them.

use super::Process;

/// The conductor.
pub const CONDUCTOR: Process = Process {
    name: "conductor",
    about: "Serves a model with one conductor, its workers, and a router in front. `conductor kernels --help` is about \
            compiling GPU kernels ahead of time.",
    example: ("max_step_tokens", "256"),
    prints_config: true,
};

/// The command of the conductor that compiles kernels.
pub const KERNELS: Process = Process {
    name: "conductor kernels",
    about: "Compiles the kernels of NVIDIA GPUs ahead of time. Needs libnvrtc.so.13, and no GPU.",
    example: ("out", "\"kernels\""),
    prints_config: false,
};

/// The router.
pub const ROUTER: Process = Process {
    name: "router",
    about: "Serves the OpenAI HTTP API and the gRPC API in front of conductors that run elsewhere.",
    example: ("drain_timeout", "60"),
    prints_config: true,
};

/// A worker.
pub const WORKER: Process = Process {
    name: "worker",
    about: "Joins a cluster as one more worker. Its conductor sends it the model and all other settings.",
    example: ("rank", "2"),
    prints_config: false,
};
