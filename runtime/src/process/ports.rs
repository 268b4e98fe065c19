//! The ports of a process that serves clients.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tutti_settings::{AddressSettings, TlsSettings};

use crate::{
    Error,
    announce::{Announcement, Prompt},
    listen,
    tls::PublicTls,
};

/// Bound ports of clients and operators.
pub struct Ports {
    pub(super) http: TcpListener,
    pub(super) grpc: TcpListener,
    pub(super) operations: Option<TcpListener>,
    pub(super) tls: Option<PublicTls>,
    pub(super) addresses: AddressSettings,
}

impl Ports {
    /// Binds the ports. Call this before anything that takes long, so that a port in use is reported at once. Must be
    /// called inside a Tokio runtime.
    pub fn bind(addresses: &AddressSettings, tls: &TlsSettings) -> Result<Self, Error> {
        Ok(Self {
            tls: PublicTls::read(tls)?,
            http: listen::tcp("http", addresses.http)?,
            grpc: listen::tcp("grpc", addresses.grpc)?,
            operations: addresses.operations.map(|it| listen::tcp("operations", it)).transpose()?,
            addresses: addresses.clone(),
        })
    }

    /// The addresses of clients.
    pub fn of_clients(&self) -> [SocketAddr; 2] {
        [self.addresses.http, self.addresses.grpc]
    }

    /// The announcement that the process logs once it is ready. `prompt` is the prompt in the command to try.
    pub fn announcement(&self, prompt: Option<Prompt>) -> Announcement {
        let bound = |listener: &TcpListener, setting: SocketAddr| listener.local_addr().unwrap_or(setting);
        Announcement {
            http: bound(&self.http, self.addresses.http),
            grpc: bound(&self.grpc, self.addresses.grpc),
            prompt,
            is_encrypted: self.tls.is_some(),
        }
    }
}
