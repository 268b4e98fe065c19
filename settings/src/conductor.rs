//! The conductor with its workers and the embedded router.

use std::net::SocketAddr;

use crate::{
    AddressSettings, ByteSize, ClusterAddress, ClusterSettings, ClusterTlsSettings, ConnectionSettings,
    DeviceSettings, DrainSettings, EngineSettings, FaultSettings, Invalid, MembershipSettings,
    MetricsSettings, ModelSettings, RouterSettings, Settings, SimSettings, TelemetrySettings,
    TensorParallelSettings, TlsSettings, TraceSettings, WeightSettings,
};

process! {
    /// A conductor's settings.
    pub struct ConductorSettings {
        /// The model, and its limits for clients.
        model: ModelSettings,
        /// The form of the model's weights.
        weights: WeightSettings,
        /// The number of workers.
        cluster: ClusterSettings,
        /// The division of a model among workers.
        tensor_parallel: TensorParallelSettings,
        /// Addresses that clients and operators reach.
        addresses: AddressSettings,
        /// Encryption of the ports that clients reach.
        tls: TlsSettings,
        /// Encryption inside the cluster.
        cluster_tls: ClusterTlsSettings,
        /// Roles of workers, and the way in which they join.
        membership: MembershipSettings,
        /// The device of each worker.
        device: DeviceSettings,
        /// The engine of each worker.
        engine: EngineSettings,
        /// Timeouts that detect faults, and the limit on queued requests.
        faults: FaultSettings,
        /// Draining of requests before the process ends.
        drain: DrainSettings,
        /// Step traces.
        trace: TraceSettings,
        /// Logs and spans.
        telemetry: TelemetrySettings,
        /// Names of metrics.
        metrics: MetricsSettings,
        tables:
        /// Connections of each listener.
        connections: ConnectionSettings,
        /// The embedded router.
        router: RouterSettings,
        /// The simulated device.
        sim: SimSettings,
    }
}

impl ConductorSettings {
    /// Number of workers without a topology file: `workers`, or as many as one replica of `tp` ranks has.
    pub fn workers(&self) -> u32 {
        self.cluster.workers.unwrap_or(self.tensor_parallel.tp)
    }

    /// Refuses settings that cannot work. Checks only the settings themselves, not files or devices.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        let (workers, tp) = (self.workers(), self.tensor_parallel.tp);
        if !workers.is_multiple_of(tp) {
            return Err(Invalid::new("tp", format!("is {tp}, which does not divide the {workers} workers")));
        }
        if self.tensor_parallel.ep && tp == 1 && self.membership.topology.is_none() {
            return Err(Invalid::new("ep", "divides experts among the ranks of a group, but tp is 1"));
        }
        if self.membership.topology.is_some() && (workers, tp) != (1, 1) {
            let field =
                if self.cluster.workers.is_none_or(|workers| workers == 1) { "tp" } else { "workers" };
            return Err(Invalid::new(field, "is for the topology file to say, where there is one"));
        }
        if self.engine.kv_cache_memory == Some(ByteSize(0)) {
            return Err(Invalid::new("kv_cache_memory", "is 0, but requests need some"));
        }
        self.engine.check_chunk_shapes()?;
        if self.faults.slow_worker_ratio == 1 {
            return Err(Invalid::new("slow_worker_ratio", "is 1, by which half of all workers are slow"));
        }
        let names = self.model.served_names();
        if names.iter().any(|name| name.is_empty()) {
            return Err(Invalid::new(
                "served_model_name",
                "is empty, or has an empty name between its commas",
            ));
        }
        let MembershipSettings { cluster_grpc, cluster_token_file, worker_listen, .. } = &self.membership;
        if cluster_grpc.is_some() && cluster_token_file.is_none() {
            let message = "is required with --cluster-grpc: a file with the secret of routers and operators";
            return Err(Invalid::new("cluster_token_file", message));
        }
        if cluster_grpc.is_some() && cluster_grpc == worker_listen && !has_port_0(cluster_grpc.as_ref()) {
            return Err(Invalid::new("cluster_grpc", "is also the address of worker_listen"));
        }
        if self.membership.state_directory.is_some() && has_port_0(worker_listen.as_ref()) {
            let message =
                "has port 0, but workers that outlive a conductor dial the next one at the same address";
            return Err(Invalid::new("worker_listen", message));
        }
        self.tls.files()?;
        self.cluster_tls.files()?;
        self.sim.validate()?;
        self.check_addresses()
    }

    /// Refuses two services on one port. Port 0 never clashes, since it stands for a free port each time.
    fn check_addresses(&self) -> Result<(), Invalid> {
        let tcp = |address: &Option<ClusterAddress>| match address {
            Some(ClusterAddress::Tcp(address)) => Some(*address),
            _ => None,
        };
        let (workers, cluster) = (tcp(&self.membership.worker_listen), tcp(&self.membership.cluster_grpc));
        let AddressSettings { http, grpc, operations } = self.addresses;
        let named = [
            ("http", Some(http)),
            ("grpc", Some(grpc)),
            ("operations", operations),
            ("worker_listen", workers),
            ("cluster_grpc", cluster),
        ];
        for (index, (field, address)) in named.iter().enumerate() {
            let taken = named[..index]
                .iter()
                .find(|(_, other)| other.zip(*address).is_some_and(|(a, b)| clash(a, b)));
            if let (Some((other, _)), Some(address)) = (taken, address) {
                return Err(Invalid::new(*field, format!("{address} is also the address of {other}")));
            }
        }
        Ok(())
    }
}

fn has_port_0(address: Option<&ClusterAddress>) -> bool {
    matches!(address, Some(ClusterAddress::Tcp(address)) if address.port() == 0)
}

fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() != 0
        && a.port() == b.port()
        && (a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified())
}
