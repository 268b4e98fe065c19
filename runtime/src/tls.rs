//! Encryption by TLS: of the ports for clients ([`PublicTls`]), and of TCP connections inside the cluster
//! ([`ClusterTransport`]).
//!
//! Certificates are PEM files. They are read again when they change, and new connections then use the new certificates.
//! If the new files have a mistake, the old certificates stay in force. A metric reports how long the certificates are
//! valid.
//!
//! Inside the cluster both sides show a certificate ([`roles`]). Each side logs why it refuses the other.

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
    blocking::BlockingTls,
    cluster::ClusterTransport,
    dial::{Dial, check_url},
    public::PublicTls,
    server::ServerTls,
};

/// The only cryptography provider in the build. Downloads of checkpoints use it too.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Joins the messages of an error and its causes. An error of a channel names the reason only in its causes.
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
