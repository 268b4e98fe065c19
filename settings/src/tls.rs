//! Encryption: the certificates of the public ports, and the certificates with which the processes of a cluster
//! authenticate each other.

use std::path::PathBuf;

use crate::Invalid;

settings! {
    /// The certificate of the ports that clients reach.
    pub struct TlsSettings {
        "Encryption" => {
            /// PEM file with the certificate chain of the HTTP and gRPC ports, which then speak TLS alone
            tls_cert: Option<PathBuf> = None, unit "FILE";
            /// PEM file with the private key of --tls-cert
            tls_key: Option<PathBuf> = None, unit "FILE";
        }
    }
}

impl TlsSettings {
    /// The files of the chain and of its key; `None` without encryption.
    pub fn files(&self) -> Result<Option<(&PathBuf, &PathBuf)>, Invalid> {
        match (&self.tls_cert, &self.tls_key) {
            (Some(cert), Some(key)) => Ok(Some((cert, key))),
            (None, None) => Ok(None),
            (Some(_), None) => Err(Invalid::new("tls_key", "is required with --tls-cert")),
            (None, Some(_)) => Err(Invalid::new("tls_cert", "is required with --tls-key")),
        }
    }
}

/// The files of one process's certificate inside the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterTlsFiles<'a> {
    /// The chain.
    pub cert: &'a PathBuf,
    /// The private key of the chain.
    pub key: &'a PathBuf,
    /// The authorities of all certificates in the cluster.
    pub ca: &'a PathBuf,
}

settings! {
    /// The encryption of connections between processes of a cluster, the same for every process.
    pub struct ClusterTlsSettings {
        "Encryption" => {
            /// PEM file with this process's certificate chain for TCP connections inside the cluster, which then are
            /// mutual TLS
            cluster_tls_cert: Option<PathBuf> = None, unit "FILE";
            /// PEM file with the private key of --cluster-tls-cert
            cluster_tls_key: Option<PathBuf> = None, unit "FILE";
            /// PEM file with the authorities that sign the certificates of the cluster's processes
            cluster_tls_ca: Option<PathBuf> = None, unit "FILE";
            /// Allow TCP connections between machines of the cluster without encryption
            insecure_plaintext: bool = false;
        }
    }
}

impl ClusterTlsSettings {
    /// The files; `None` without encryption.
    pub fn files(&self) -> Result<Option<ClusterTlsFiles<'_>>, Invalid> {
        let Self { cluster_tls_cert, cluster_tls_key, cluster_tls_ca, insecure_plaintext } = self;
        let named = [
            ("cluster_tls_cert", cluster_tls_cert),
            ("cluster_tls_key", cluster_tls_key),
            ("cluster_tls_ca", cluster_tls_ca),
        ];
        match (cluster_tls_cert, cluster_tls_key, cluster_tls_ca) {
            (None, None, None) => Ok(None),
            (Some(cert), Some(key), Some(ca)) if !insecure_plaintext => {
                Ok(Some(ClusterTlsFiles { cert, key, ca }))
            }
            (Some(_), Some(_), Some(_)) => {
                Err(Invalid::new("insecure_plaintext", "contradicts --cluster-tls-cert: leave one out"))
            }
            _ => {
                let missing = named.iter().find(|(_, file)| file.is_none()).map_or("", |(field, _)| field);
                let message = "is missing: give all of --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca, or none";
                Err(Invalid::new(missing, message))
            }
        }
    }
}

#[cfg(test)]
mod tests;
