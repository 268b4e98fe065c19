//! The settings of a worker: those on its command line, and those that its conductor sends.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{
    ByteSize, ClusterTlsSettings, ConnectionSettings, DeviceSettings, EngineSettings, SimSettings,
    TelemetrySettings, TensorParallelSettings, TraceSettings, WeightSettings,
};

/// The settings that a conductor sends to a worker in its `Welcome`, as JSON. Both processes are of the same version,
/// so the format has no version of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSettings {
    /// The checkpoint's directory.
    pub model_dir: PathBuf,
    /// The nodes of the model that this worker holds. None means all nodes.
    pub nodes: Option<Vec<String>>,
    /// Maximum number of requests that wait at the worker beyond the running ones. The conductor never admits more
    /// requests than this.
    pub max_waiting_requests: usize,
    /// The form in which weights are loaded.
    pub weights: WeightSettings,
    /// The device, as the topology gives it to this worker's group. The number of threads is already computed.
    pub device: DeviceSettings,
    /// Limits on the connections of other workers.
    pub connections: ConnectionSettings,
    /// The number of ranks in this worker's group, and the time limit for which they wait for each other.
    pub tensor_parallel: TensorParallelSettings,
    /// Settings of the engine and its scheduler.
    pub engine: EngineSettings,
    /// Bytes of memory of the conductor's machine for this worker, weights included. It is an equal share of the memory
    /// that was free when the conductor started. None if the conductor does not start this worker's group, or if the
    /// free memory is not known.
    pub memory_share: Option<ByteSize>,
    /// Time in seconds without a step after which the conductor kills the worker.
    pub hang_timeout: u32,
    /// The step trace.
    pub trace: TraceSettings,
    /// The simulated device. Used only if `device` names it.
    pub sim: SimSettings,
}

settings! {
    /// The conductor that a worker joins, and the rank that it takes.
    pub struct JoinSettings {
        "Cluster" => {
            /// Address on which the conductor listens for workers: unix:/path or http://host:port
            conductor: Option<String> = None, unit "URL";
            /// Rank in the cluster: not that of another worker, and above those that the conductor starts
            rank: Option<u32> = None, unit "R";
            /// File with the conductor's secret for workers that join by hand
            join_token_file: Option<PathBuf> = None, unit "FILE";
        }
    }
}

process! {
    /// Settings of a worker that joins by hand. All further settings come from the conductor.
    pub struct WorkerProcessSettings {
        /// The conductor and the rank.
        join: JoinSettings,
        /// Encryption inside the cluster.
        cluster_tls: ClusterTlsSettings,
        /// Logs and spans.
        telemetry: TelemetrySettings,
        tables:
    }
}
