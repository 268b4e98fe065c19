//! The port at which this process takes pushes, and at which the leader of a group takes its ranks' reports.

use std::io;

use tokio::{net::TcpListener, runtime::Handle, sync::OnceCell};
use tonic::service::Routes;
use tutti_runtime::{
    serve::{self, ConnectionLimits},
    shutdown::Shutdown,
};

use super::Receiver;
use crate::{Network, WINDOW_BYTES, message_bytes, ranks::Reports};

/// Maximum number of concurrent pushes on one sender's connection. Further pushes wait on the sender's side.
const MAX_STREAMS: u32 = 1024;

/// A port that is opened on first use.
pub(crate) struct Listener {
    network: Network,
    port: OnceCell<u16>,
}

impl Listener {
    /// A port at the address that other workers dial.
    pub fn at(network: Network) -> Self {
        Self { network, port: OnceCell::new() }
    }

    /// Listens for senders from the first call on, as long as the process lives. Returns the port. `largest_unit` is
    /// the number of bytes of the largest unit that is received.
    pub async fn port(
        &self,
        runtime: &Handle,
        largest_unit: usize,
        services: impl FnOnce() -> (Receiver, Option<Reports>),
    ) -> io::Result<u16> {
        let port = self.port.get_or_try_init(|| async {
            let listener = self.network.bind()?;
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            let port = listener.local_addr()?.port();
            let (receiver, reports) = services();
            let mut routes = Routes::new(receiver.into_service(message_bytes(largest_unit)));
            if let Some(reports) = reports {
                routes = routes.add_service(reports.into_service());
            }
            let windows = serve::Windows { stream: WINDOW_BYTES, connection: 4 * WINDOW_BYTES };
            let connections = ConnectionLimits::from(self.network.connections.clone())
                .with_streams(MAX_STREAMS)
                .trusting_callers();
            let listener = self.network.secured(listener);
            runtime.spawn(async move {
                if let Err(error) =
                    serve::grpc(listener, routes, windows, connections, Shutdown::default()).await
                {
                    tracing::error!(%error, "no longer listens for planes");
                }
            });
            tracing::info!(port, "listens for planes");
            Ok(port)
        });
        port.await.copied()
    }
}
