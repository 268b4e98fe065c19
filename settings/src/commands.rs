//! The commands of `conductor` that call a running conductor: `status`, `drain` and `trace`.

use std::path::PathBuf;

use crate::{ClusterTlsSettings, Invalid, Settings};

settings! {
    /// The conductor that a command calls.
    pub struct CallSettings {
        "Cluster" => {
            /// The conductor's --cluster-grpc, such as http://10.0.0.1:50052 or unix:/path
            conductor: Option<String> = None, unit "URL", default "that of this user on this machine, if there is one";
            /// File with the conductor's secret for routers and operators
            cluster_token_file: Option<PathBuf> = None, unit "FILE";
        }
    }
}

settings! {
    /// The form of a report.
    pub struct ReportSettings {
        "Output" => {
            /// Print JSON
            json: bool = false;
        }
    }
}

settings! {
    /// The target of a drain, and the time that the command waits for its end.
    pub struct DrainTargetSettings {
        "Cluster" => {
            /// Rank of the worker to drain; its replica's other ranks leave with it
            worker: Option<u32> = None, unit "RANK";
            /// Drain the conductor with all its workers; its process ends
            all: bool = false;
        }
        "Faults" => {
            /// Time to wait for the end of the drain, which goes on after it
            timeout: u32 = 300, unit "SECONDS", at least 1;
        }
    }
}

settings! {
    /// The request whose trace is printed.
    pub struct TracedRequestSettings {
        "Output" => {
            /// The conductor's number of the request; without it, the newest requests are listed
            request: Option<u32> = None, unit "REQUEST";
        }
    }
}

process! {
    /// Settings of `conductor status`.
    pub struct StatusProcessSettings {
        /// The conductor to call.
        call: CallSettings,
        /// The form of the report.
        report: ReportSettings,
        /// Encryption inside the cluster.
        cluster_tls: ClusterTlsSettings,
        tables:
    }
}

process! {
    /// Settings of `conductor drain`.
    pub struct DrainProcessSettings {
        /// The conductor to call.
        call: CallSettings,
        /// The worker, or the whole conductor.
        target: DrainTargetSettings,
        /// Encryption inside the cluster.
        cluster_tls: ClusterTlsSettings,
        tables:
    }
}

process! {
    /// Settings of `conductor trace`.
    pub struct TraceProcessSettings {
        /// The conductor to call.
        call: CallSettings,
        /// The request whose trace is printed.
        traced: TracedRequestSettings,
        /// Encryption inside the cluster.
        cluster_tls: ClusterTlsSettings,
        tables:
    }
}

/// The settings of a command that calls a conductor.
pub trait CommandSettings: Settings {
    /// The conductor to call.
    fn call(&self) -> &CallSettings;

    /// The conductor to call, for a command that finds it by itself.
    fn call_mut(&mut self) -> &mut CallSettings;

    /// Encryption inside the cluster.
    fn cluster_tls(&self) -> &ClusterTlsSettings;

    /// Refuses contradictory settings of this command. [`Self::validate`] checks the settings that every command has.
    fn check(&self) -> Result<(), Invalid> {
        Ok(())
    }

    /// Refuses settings with which the command cannot call a conductor.
    fn validate(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        self.cluster_tls().files()?;
        self.check()
    }
}

impl CommandSettings for StatusProcessSettings {
    fn call(&self) -> &CallSettings {
        &self.call
    }

    fn call_mut(&mut self) -> &mut CallSettings {
        &mut self.call
    }

    fn cluster_tls(&self) -> &ClusterTlsSettings {
        &self.cluster_tls
    }
}

impl CommandSettings for DrainProcessSettings {
    fn call(&self) -> &CallSettings {
        &self.call
    }

    fn call_mut(&mut self) -> &mut CallSettings {
        &mut self.call
    }

    fn cluster_tls(&self) -> &ClusterTlsSettings {
        &self.cluster_tls
    }

    fn check(&self) -> Result<(), Invalid> {
        match (self.target.worker, self.target.all) {
            (Some(_), false) | (None, true) => Ok(()),
            (None, false) => Err(Invalid::new("worker", "is missing: give --worker RANK, or --all")),
            (Some(_), true) => Err(Invalid::new("all", "contradicts --worker: leave one out")),
        }
    }
}

impl CommandSettings for TraceProcessSettings {
    fn call(&self) -> &CallSettings {
        &self.call
    }

    fn call_mut(&mut self) -> &mut CallSettings {
        &mut self.call
    }

    fn cluster_tls(&self) -> &ClusterTlsSettings {
        &self.cluster_tls
    }
}
