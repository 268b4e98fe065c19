//! Encryption by TLS: of the ports that clients reach ([`PublicTls`]), and of TCP connections inside the cluster
//! ([`ClusterTransport`]).
//!
//! Certificates are PEM files. They are read again when they change, and new connections then use the new ones. Files
//! with a mistake leave the certificates as they were. A metric says how long they are valid.
//!
//! Inside the cluster both sides show a certificate ([`roles`]), and each side says in its log why it refuses the
//! other.

mod blocking;
mod certificate;
mod cluster;
mod dial;
mod expiry;
mod public;
mod reasons;
pub mod roles;
mod server;

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};

pub(crate) use self::server::RefusalLog;
pub use self::{
    blocking::BlockingTls, cluster::ClusterTransport, dial::Dial, public::PublicTls, server::ServerTls,
};

/// The only cryptography in the build: the one that downloads of checkpoints use too.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Joins an error and its causes. An error of a channel names the reason only in its causes.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
