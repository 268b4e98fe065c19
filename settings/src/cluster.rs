//! The workers of a cluster, the addresses of a process, and the device that workers compute on.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    ClusterAddress, Kind,
    value::{self, Value},
};

/// Maximum number of workers that one conductor's settings or topology file can name.
pub const MAX_WORKERS: u32 = 256;

/// Maximum number of ranks of one conductor. Workers that join by hand have ranks above those of the workers that the
/// settings name.
pub const MAX_RANKS: u32 = 1024;

settings! {
    /// The number of workers.
    pub struct ClusterSettings {
        "Cluster" => {
            /// Worker processes to start; each holds the whole model unless --tp divides it
            workers: Option<u32> = None, unit "N", default "T of --tp", at least 1, at most MAX_WORKERS as u64;
        }
    }
}

settings! {
    /// The division of one model among workers.
    pub struct TensorParallelSettings {
        "Cluster" => {
            /// Workers that divide one model: N workers are N/T replicas of T ranks
            tp: u32 = 1, unit "T", at least 1, at most MAX_WORKERS as u64;
            /// Give each of the T ranks whole experts of a mixture of experts, not a share of every expert
            ep: bool = false;
        }
        "Faults" => {
            /// Time that a rank may keep its group waiting before the group restarts
            collective_timeout: u32 = 30, unit "SECONDS", at least 1, at most 3600;
        }
    }
}

settings! {
    /// The roles of workers, and the way in which they join.
    pub struct MembershipSettings {
        "Cluster" => {
            /// TOML or YAML file with groups of workers and what each runs; replaces --workers and --tp
            topology: Option<PathBuf> = None, unit "FILE";
            /// Do not start the embedded router
            no_router: bool = false;
            /// Address that workers dial: unix:/path or ip:port
            worker_listen: Option<ClusterAddress> = None, unit "ADDR", default "a Unix socket in a private directory";
            /// File with the secret of workers that join by hand; they need one if --worker-listen is given
            join_token_file: Option<PathBuf> = None, unit "FILE";
            /// Address that routers and operators dial: unix:/path or ip:port
            cluster_grpc: Option<ClusterAddress> = None, unit "ADDR", default "a Unix socket in a private directory";
            /// File with the secret of routers and operators; required if --cluster-grpc is given
            cluster_token_file: Option<PathBuf> = None, unit "FILE";
            /// Directory, of mode 0700, for the cluster's sockets and secret; workers that the conductor starts outlive
            /// its death and join the next conductor that has the directory
            state_directory: Option<PathBuf> = None, unit "DIR", default "none: workers end with their conductor";
        }
    }
}

settings! {
    /// The addresses that clients and operators reach.
    pub struct AddressSettings {
        "Cluster" => {
            /// HTTP address: OpenAI API, health and metrics
            http: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8000)), unit "ADDR";
            /// gRPC address: inference API, health and reflection
            grpc: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 50051)), unit "ADDR";
            /// HTTP address with /health, /ready and /metrics alone, never encrypted, for probes; --http has them too
            operations: Option<SocketAddr> = None, unit "ADDR";
        }
    }
}

settings! {
    /// The device of a worker.
    pub struct DeviceSettings {
        "Device and memory" => {
            /// Device of the workers: auto, cpu, cuda, or sim, a cost model that computes nothing
            device: DeviceChoice = DeviceChoice::Auto;
            /// Compute threads per worker
            threads: Option<u32> = None, unit "N", default "the cores divided by the workers", at least 1, at most 1024;
            /// Pin each compute thread to a core of its own; those of a worker share a NUMA node where they fit
            pin_threads: bool = false;
            /// Instruction path on a CPU
            cpu_isa: CpuIsa = CpuIsa::Auto;
            /// Folder of GPU kernels from `conductor kernels`; a worker compiles what it does not find there
            compiled_kernels: Option<PathBuf> = None, unit "DIR";
        }
    }
}

choices! {
    /// The instruction path of CPU workers. The names are the same as those of the instruction paths in the kernels.
    pub enum CpuIsa {
        /// The best path of the worker's machine. Each other path gives the same bits on all CPUs that have it.
        Auto = "auto",
        /// Plain code, on every machine.
        Portable = "portable",
        /// AVX2 with FMA and F16C.
        Avx2 = "avx2",
        /// AVX-512 F, BW, DQ and VL.
        Avx512 = "avx512",
        /// AVX-512 with dot products of bytes.
        Avx512Vnni = "avx512-vnni",
        /// AVX-512 with dot products of bytes and of bfloat16.
        Avx512Bf16 = "avx512-bf16",
    }
}

/// The choice of the device that workers compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// A GPU if the worker's machine has one that this build can use, or else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// A simulated device: its steps take the time of a cost model, and its tokens have no meaning.
    Sim,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            "sim" => Ok(Self::Sim),
            other => Err(format!("this build has no device {other:?}; it has auto, cpu, cuda, sim")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Sim => "sim",
        })
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(device: DeviceChoice) -> Self {
        device.to_string()
    }
}

impl Value for DeviceChoice {
    const KIND: Kind = Kind::Parsed(value::parse::<Self>);

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}
