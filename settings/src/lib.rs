//! Every setting of every process, declared once.
//!
//! A declaration gives a setting its name, type, default, unit, range and one line of help. The declarations determine
//! the command line, the keys of the file, the `TUTTI_` variables, `--print-config`, the settings that a conductor
//! sends its workers, `docs/configuration.md`, and the schema of the Helm chart's values.
//!
//! - A *group* is a struct made by `settings!`: settings that belong to one part of the program. Groups are passed on
//!   whole: the conductor sends [`EngineSettings`] to its workers, and the engine and its scheduler use the same
//!   struct.
//! - A *process* is a struct made by `process!`: all groups of an executable. In the config file, the keys of most
//!   groups stand side by side at the top level. A *table* is a group whose keys stand in a table of the file.

#[macro_use]
mod declare;
mod byte_size;
mod changes;
pub mod chart;
mod chunk_shapes;
mod cluster;
mod cluster_address;
mod commands;
mod conductor;
mod connections;
mod engine;
mod faults;
mod invalid;
mod kernels;
mod live;
mod model;
mod output;
pub mod page;
mod quantize;
mod router;
mod sim;
mod socket_address;
mod tls;
mod value;
mod worker;

pub use byte_size::ByteSize;
pub use changes::{Change, Changes};
pub use chunk_shapes::ChunkShapes;
pub use cluster::{
    AddressSettings, ClusterSettings, CpuIsa, DeviceChoice, DeviceSettings, MAX_RANKS, MAX_WORKERS,
    MembershipSettings, TensorParallelSettings,
};
pub use cluster_address::ClusterAddress;
pub use commands::{
    CallSettings, CommandSettings, DrainProcessSettings, DrainTargetSettings, ReportSettings,
    StatusProcessSettings, TraceProcessSettings, TracedRequestSettings,
};
pub use conductor::ConductorSettings;
pub use connections::ConnectionSettings;
pub use declare::{Choice, Kind, Setting, Settings};
pub use engine::{
    Admission, Chunking, DEFAULT_RUNNING_REQUESTS, EngineSettings, KvCacheDtype, MediaPrefill, PrefillSharing,
};
pub use faults::{DrainSettings, FaultSettings};
pub use invalid::Invalid;
pub use kernels::{KernelSettings, KernelsProcessSettings};
pub use live::LiveGroups;
pub use model::{LoadFormat, ModelSettings, Quantize, WeightSettings};
pub use output::{LogFormat, MetricsSettings, TelemetrySettings, TraceSettings};
pub use quantize::{CheckpointScheme, QuantizeProcessSettings, QuantizeSettings};
pub use router::{
    AccessLog, ChatSpecialTokens, ConductorsSettings, FleetSettings, KeyFileGone, RevokedRequests,
    RouterProcessSettings, RouterSettings,
};
pub use sim::{SimCosts, SimProfile, SimSettings};
pub use tls::{ClusterTlsFiles, ClusterTlsSettings, TlsSettings};
pub use worker::{JoinSettings, WorkerProcessSettings, WorkerSettings};
