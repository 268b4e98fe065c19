//! TLS on the ports that clients reach: a certificate chain and its key.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{ServerConfig, sign::SingleCertAndKey};
use tutti_settings::TlsSettings;

use super::{
    certificate::{File, Identity, identity},
    provider,
    server::ServerTls,
};
use crate::{
    Error,
    watched_files::{Content, ReloadMetrics, WatchedFiles},
};

/// ALPN protocols on the HTTP port, in the order of preference (RFC 7301).
const HTTP: &[&[u8]] = &[b"h2", b"http/1.1"];
/// The ALPN protocol of gRPC.
pub(super) const GRPC: &[&[u8]] = &[b"h2"];

/// The certificate of the ports for clients.
#[derive(Debug)]
pub struct PublicTls {
    cert: PathBuf,
    key: PathBuf,
    watched: WatchedFiles,
    not_after: Option<i64>,
    http: ServerTls,
    grpc: ServerTls,
}

impl PublicTls {
    /// Reads the files that the settings name. `None` if they name none, and the ports are not encrypted.
    ///
    /// # Errors
    /// Names the setting, the file and the mistake.
    pub fn read(settings: &TlsSettings) -> Result<Option<Self>, Error> {
        let Some((cert, key)) = settings.files().map_err(Error::from)? else { return Ok(None) };
        let watched = WatchedFiles::new(vec![cert.clone(), key.clone()]);
        let configs = configs(cert, key)?;
        Ok(Some(Self {
            cert: cert.clone(),
            key: key.clone(),
            watched,
            not_after: configs.not_after,
            http: ServerTls::new(configs.http, false),
            grpc: ServerTls::new(configs.grpc, false),
        }))
    }

    /// The TLS of the HTTP port.
    pub fn http(&self) -> ServerTls {
        self.http.clone()
    }

    /// The TLS of the gRPC port.
    pub fn grpc(&self) -> ServerTls {
        self.grpc.clone()
    }

    /// Reads the files again whenever they change. Works only while the future is polled.
    pub async fn follow(self, metrics: ReloadMetrics) {
        let watched = self.watched.clone();
        metrics.expires(Content::PublicCertificates, self.not_after);
        let own = metrics.clone();
        let reload = move || {
            let Configs { http, grpc, not_after } = configs(&self.cert, &self.key)?;
            self.http.install(http);
            self.grpc.install(grpc);
            own.expires(Content::PublicCertificates, not_after);
            Ok(())
        };
        watched.follow(Content::PublicCertificates, &metrics, reload).await;
    }
}

struct Configs {
    http: ServerConfig,
    grpc: ServerConfig,
    not_after: Option<i64>,
}

fn configs(cert: &Path, key: &Path) -> Result<Configs, Error> {
    let Identity { resolver, not_after } =
        identity(File { field: "tls_cert", path: cert }, File { field: "tls_key", path: key })?;
    Ok(Configs { http: config(resolver.clone(), HTTP)?, grpc: config(resolver, GRPC)?, not_after })
}

fn config(identity: Arc<SingleCertAndKey>, protocols: &[&[u8]]) -> Result<ServerConfig, Error> {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| Error::internal(format!("the cryptography has no version of TLS: {e}")))?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(identity);
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    Ok(config)
}
