//! The address at which this process takes pushes, and at which a group's leader takes its ranks' reports.

use std::io;

use tokio::{runtime::Handle, sync::OnceCell};
use tonic::service::Routes;
use tutti_runtime::{
    serve::{self, ConnectionLimits},
    shutdown::Shutdown,
};

use super::Receiver;
use crate::{Network, WINDOW_BYTES, message_bytes, network::ServiceAddress, ranks::Reports};

/// Maximum number of concurrent pushes on one sender's connection. Further pushes wait on the sender's side.
const MAX_STREAMS: u32 = 1024;

/// A port or socket that is opened on first use.
pub(crate) struct Listener {
    network: Network,
    address: OnceCell<ServiceAddress>,
}

impl Listener {
    /// A listener where other workers dial.
    pub fn at(network: Network) -> Self {
        Self { network, address: OnceCell::new() }
    }

    /// Listens for senders from the first call on until the process ends. Returns the address. `largest_unit` is the
    /// number of bytes of the largest unit that is received.
    pub async fn address(
        &self,
        runtime: &Handle,
        largest_unit: usize,
        services: impl FnOnce() -> (Receiver, Option<Reports>),
    ) -> io::Result<ServiceAddress> {
        let address = self.address.get_or_try_init(|| async {
            let (listener, address) = self.network.listen()?;
            let (receiver, reports) = services();
            let mut routes = Routes::new(receiver.into_service(message_bytes(largest_unit)));
            if let Some(reports) = reports {
                routes = routes.add_service(reports.into_service());
            }
            let windows = serve::Windows { stream: WINDOW_BYTES, connection: 4 * WINDOW_BYTES };
            let connections = ConnectionLimits::from(self.network.connections.clone())
                .with_streams(MAX_STREAMS)
                .trusting_callers();
            runtime.spawn(async move {
                if let Err(error) =
                    serve::grpc(listener, routes, windows, connections, Shutdown::default()).await
                {
                    tracing::error!(%error, "no longer listens for planes");
                }
            });
            match &address {
                ServiceAddress::Port(port) => tracing::info!(port, "listens for planes"),
                ServiceAddress::Socket(socket) => tracing::info!(socket, "listens for planes"),
            }
            Ok(address)
        });
        address.await.cloned()
    }
}
