//! Connections to receivers, which all pushes share.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use tonic::transport::Channel;
use tutti_scheduler::TransferError;

use super::counts::Transport;
use crate::{KEEP_ALIVE, Network, WINDOW_BYTES};

/// Maximum number of receivers whose connections are kept.
const MAX_CONNECTIONS: usize = 64;

/// Connections to receivers. Each is opened on first use, and again after a failure.
pub(crate) struct Connections {
    network: Network,
    open: Mutex<HashMap<String, Connection>>,
}

struct Connection {
    channel: Channel,
    /// The transport that was logged last.
    logged: Option<Transport>,
}

impl Connections {
    pub fn new(network: Network) -> Self {
        Self { network, open: Mutex::default() }
    }

    pub fn to(&self, address: &str) -> Result<Channel, TransferError> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = open.get(address) {
            return Ok(connection.channel.clone());
        }
        let dial = self.network.dial(address).map_err(|e| TransferError::Refused(e.to_string()))?;
        let channel = dial
            .tuned(|endpoint| {
                endpoint
                    .initial_stream_window_size(WINDOW_BYTES)
                    .http2_keep_alive_interval(KEEP_ALIVE)
                    .keep_alive_timeout(KEEP_ALIVE)
                    .tcp_nodelay(true)
            })
            .connect_lazy();
        if open.len() == MAX_CONNECTIONS {
            open.clear();
        }
        open.insert(address.to_owned(), Connection { channel: channel.clone(), logged: None });
        Ok(channel)
    }

    /// Logs the transport to a receiver whenever the transport changes.
    pub fn log_transport(&self, address: &str, transport: Transport) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(connection) = open.get_mut(address) else { return };
        if connection.logged.replace(transport) != Some(transport) {
            tracing::info!(receiver = address, transport = transport.name(), "sending planes");
        }
    }
}
