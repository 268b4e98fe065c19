//! Connecting to a process of the cluster by gRPC.

use std::{io, sync::Arc, time::Duration};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::{io::AsyncBufReadExt, net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Channel, Endpoint, Error as TransportError};
use tower::{service_fn, util::BoxService};

use super::{cluster::MutualTls, reasons, roles::Role};
use crate::Error;

/// Maximum time for the TLS handshake, until the server has accepted this process's certificate.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A process to connect to, with the connection's encryption.
#[derive(Clone, Debug)]
pub struct Dial {
    endpoint: Endpoint,
    tls: Option<Encrypted>,
}

/// The peer of an encrypted connection.
#[derive(Clone, Debug)]
struct Encrypted {
    authority: String,
    tls: Arc<MutualTls>,
    role: Role,
}

impl Dial {
    pub(super) fn plain(field: &str, url: &str) -> Result<Self, Error> {
        Ok(Self { endpoint: endpoint(field, url)?, tls: None })
    }

    pub(super) fn encrypted(
        field: &str,
        authority: &str,
        tls: Arc<MutualTls>,
        role: Role,
    ) -> Result<Self, Error> {
        // The channel's URL is plain HTTP, because the channel's connector adds TLS.
        let endpoint = endpoint(field, &format!("http://{authority}"))?;
        Ok(Self { endpoint, tls: Some(Encrypted { authority: authority.into(), tls, role }) })
    }

    /// Sets the options of the channel.
    pub fn tuned(self, tune: impl FnOnce(Endpoint) -> Endpoint) -> Self {
        Self { endpoint: tune(self.endpoint), ..self }
    }

    /// Connects now.
    pub async fn connect(&self) -> Result<Channel, TransportError> {
        match &self.tls {
            None => self.endpoint.connect().await,
            Some(tls) => self.endpoint.connect_with_connector(connector(tls)).await,
        }
    }

    /// A channel that connects when it is first used. Must be called inside a Tokio runtime.
    pub fn connect_lazy(&self) -> Channel {
        match &self.tls {
            None => self.endpoint.connect_lazy(),
            Some(tls) => self.endpoint.connect_with_connector_lazy(connector(tls)),
        }
    }
}

/// Refuses a text that is no URL of a process of the cluster.
pub fn check_url(field: &str, url: &str) -> Result<(), Error> {
    let is_url = match url.split_once(':') {
        Some(("unix", path)) => !path.is_empty(),
        Some(("http" | "https", _)) => {
            url.parse::<Uri>().is_ok_and(|url| url.host().is_some_and(|host| !host.is_empty()))
        }
        _ => false,
    };
    if is_url {
        return Ok(());
    }
    let message = format!("{url:?} is not a URL such as http://10.0.0.1:50052 or unix:/path");
    Err(Error::invalid(field, message))
}

fn endpoint(field: &str, url: &str) -> Result<Endpoint, Error> {
    Endpoint::from_shared(url.to_owned())
        .map_err(|e| Error::invalid(field, format!("{url:?} is not an address: {e}")))
}

fn connector(to: &Encrypted) -> BoxService<Uri, TokioIo<TlsStream<TcpStream>>, io::Error> {
    let to = Arc::new(to.clone());
    BoxService::new(service_fn(move |_: Uri| {
        let to = to.clone();
        async move { to.connect().await.map(TokioIo::new) }
    }))
}

impl Encrypted {
    async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        let socket = TcpStream::connect(&self.authority).await?;
        socket.set_nodelay(true)?;
        let shaken = timeout(HANDSHAKE, self.shake_hands(socket)).await;
        let reason = match shaken {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(reason)) => reason,
            Err(_) => format!("its handshake did not end within {HANDSHAKE:?}"),
        };
        if let Some(more) = self.tls.refusals.lock().count() {
            tracing::warn!(peer = self.authority, reason, more, "no encrypted connection");
        }
        Err(io::Error::other(format!("no encrypted connection to {}: {reason}", self.authority)))
    }

    async fn shake_hands(&self, socket: TcpStream) -> Result<TlsStream<TcpStream>, String> {
        let connector = TlsConnector::from(self.tls.client(self.role));
        let name = self.role.server_name().map_err(|e| e.to_string())?;
        let mut stream = connector.connect(name, socket).await.map_err(|e| reasons::of(&e))?;
        // In TLS 1.3, a server checks its client's certificate after the client's handshake has ended. The server then
        // sends its HTTP/2 settings, or an alert that refuses the certificate. The client waits for either.
        match stream.fill_buf().await {
            Ok([]) => Err("it closed the connection during the handshake".into()),
            Ok(_) => Ok(stream),
            Err(error) => Err(reasons::of(&error)),
        }
    }
}

#[cfg(test)]
mod tests;
