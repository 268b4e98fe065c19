//! The port at which this process takes pushes, and the leader of a group its ranks' reports.

use std::{io, net::Ipv4Addr};

use tokio::{net::TcpListener, runtime::Handle, sync::OnceCell};
use tonic::transport::{Server, server::TcpIncoming};
use tutti_proto::cluster::v1::{
    plane_transfer_server::PlaneTransferServer, rank_reports_server::RankReportsServer,
};

use super::{
    KEEP_ALIVE, MAX_STREAMS, WINDOW_BYTES, message_bytes, rank_reports::ReportReceiver, receiver::Receiver,
};

/// A port that is opened on first use.
#[derive(Default)]
pub(super) struct Listener {
    port: OnceCell<u16>,
}

impl Listener {
    /// Listens for senders from the first call on, as long as the process lives. Returns the port. `largest_unit` is the
    /// number of bytes of the largest unit that is received.
    pub async fn port(
        &self,
        runtime: &Handle,
        largest_unit: usize,
        services: impl FnOnce() -> (Receiver, Option<ReportReceiver>),
    ) -> io::Result<u16> {
        let port = self.port.get_or_try_init(|| async {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await?;
            let port = listener.local_addr()?.port();
            let (receiver, reports) = services();
            let service =
                PlaneTransferServer::new(receiver).max_decoding_message_size(message_bytes(largest_unit));
            let server = Server::builder()
                .max_concurrent_streams(MAX_STREAMS)
                .http2_keepalive_interval(Some(KEEP_ALIVE))
                .initial_stream_window_size(WINDOW_BYTES)
                .initial_connection_window_size(4 * WINDOW_BYTES)
                .add_service(service)
                .add_optional_service(reports.map(RankReportsServer::new));
            // Without nodelay, an answer of two TCP segments waits for the sender's delayed acknowledgement (about
            // 40 ms). The setting of `Server` would apply only to listeners that the server opens itself.
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            runtime.spawn(async move {
                if let Err(error) = server.serve_with_incoming(incoming).await {
                    tracing::error!(%error, "no longer listens for planes");
                }
            });
            tracing::info!(port, "listens for planes");
            Ok(port)
        });
        port.await.copied()
    }
}
