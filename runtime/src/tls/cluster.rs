//! Connections inside the cluster: mutual TLS over TCP, or plaintext that stays on this machine unless settings allow
//! more.

use std::{
    fmt,
    net::{IpAddr, SocketAddr, TcpStream},
    path::PathBuf,
    sync::Arc,
};

use parking_lot::{Mutex, RwLock};
use rustls::{ClientConfig, ServerConfig, client::Resumption, server::NoServerSessionStorage};
use tutti_settings::ClusterTlsSettings;

use super::{
    blocking::BlockingTls,
    certificate::{File, Identity, authorities, identity},
    dial::{Dial, check_url},
    provider,
    public::GRPC,
    roles::{self, Role},
    server::{RefusalLog, ServerTls},
};
use crate::{
    Error,
    watched_files::{Content, ReloadMetrics, WatchedFiles},
};

/// The protocol over TLS between the ranks of a group.
const RANKS: &[&[u8]] = &[b"tutti-ranks"];

/// The rule for connections inside the cluster. By default there is no encryption, and TCP stays on this machine.
#[derive(Clone, Debug, Default)]
pub struct ClusterTransport {
    tls: Option<Arc<MutualTls>>,
    is_plaintext_allowed: bool,
}

impl ClusterTransport {
    /// Reads the files that the settings name.
    ///
    /// # Errors
    /// Names the setting, the file and the mistake.
    pub fn read(settings: &ClusterTlsSettings) -> Result<Self, Error> {
        let files = settings.files().map_err(Error::from)?.map(|files| Files {
            cert: files.cert.clone(),
            key: files.key.clone(),
            ca: files.ca.clone(),
        });
        let tls = files.map(MutualTls::read).transpose()?.map(Arc::new);
        Ok(Self { tls, is_plaintext_allowed: settings.insecure_plaintext })
    }

    /// Reads the files again whenever they change. Works only while the future is polled.
    pub async fn follow(self, metrics: ReloadMetrics) {
        let Some(tls) = self.tls else { return };
        metrics.expires(Content::ClusterCertificates, tls.not_after);
        let (watched, own) = (tls.watched.clone(), metrics.clone());
        let reload = move || {
            own.expires(Content::ClusterCertificates, tls.reload()?);
            Ok(())
        };
        watched.follow(Content::ClusterCertificates, &metrics, reload).await;
    }

    /// True if TCP connections are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Refuses a listener that other machines reach without encryption. `field` is the setting with its address.
    pub fn check_listen(&self, field: &str, address: SocketAddr) -> Result<(), Error> {
        self.check(field, address, address.ip().to_canonical().is_loopback())
    }

    /// Refuses an unencrypted connection to `authority` (`HOST:PORT`) on another machine.
    pub fn check_dial(&self, field: &str, authority: &str) -> Result<(), Error> {
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let ip = host.trim_matches(['[', ']']).parse::<IpAddr>();
        let is_local = ip.map_or(host == "localhost", |ip| ip.to_canonical().is_loopback());
        self.check(field, authority, is_local)
    }

    fn check(&self, field: &str, address: impl fmt::Display, is_local: bool) -> Result<(), Error> {
        if is_local || self.is_encrypted() || self.is_plaintext_allowed {
            return Ok(());
        }
        let message = format!(
            "{address} is not on this machine's loopback: give --cluster-tls-cert, --cluster-tls-key and \
             --cluster-tls-ca, or allow connections without encryption with --insecure-plaintext"
        );
        Err(Error::invalid(field, message))
    }

    /// The TLS of a gRPC listener for processes of this role; `None` without encryption.
    pub fn server(&self, peers: Role) -> Option<ServerTls> {
        let tls = self.tls.as_ref()?;
        Some(match peers {
            Role::Router => tls.routers.clone(),
            Role::Worker | Role::Conductor => tls.workers.clone(),
        })
    }

    /// The address and encryption for the process at `url`: `unix:/path`, `http://host:port` or `https://host:port`.
    /// The last two mean the same, because this process's certificates alone decide whether a TCP connection is
    /// encrypted. `field` is the setting that an error names.
    pub fn dial(&self, field: &str, url: &str, to: Role) -> Result<Dial, Error> {
        check_url(field, url)?;
        let Some((scheme, rest)) = url.split_once("://") else { return Dial::plain(field, url) };
        if scheme == "https" && !self.is_encrypted() {
            let message = format!("{url} needs --cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca");
            return Err(Error::invalid(field, message));
        }
        let authority = rest.split('/').next().unwrap_or(rest);
        self.check_dial(field, authority)?;
        match &self.tls {
            Some(tls) => Dial::encrypted(field, authority, tls.clone(), to),
            None => Dial::plain(field, url),
        }
    }

    /// Wraps a connection that another rank of this worker's group has opened. `None` without encryption. The first
    /// reads of the stream perform the handshake.
    pub fn accepted_rank(&self, socket: &TcpStream) -> Option<Result<BlockingTls, Error>> {
        let tls = self.tls.as_ref()?;
        Some(BlockingTls::accepted(socket, tls.ranks.config()))
    }

    /// Wraps a connection to the leader of this worker's group. `None` without encryption.
    pub fn dialed_leader(&self, socket: &TcpStream) -> Option<Result<BlockingTls, Error>> {
        let tls = self.tls.as_ref()?;
        Some(BlockingTls::dialed(socket, tls.clients.read().leader.clone()))
    }
}

#[derive(Debug)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    ca: PathBuf,
}

/// This process's certificate and the authorities that it trusts, in the form of each use.
#[derive(Debug)]
pub(super) struct MutualTls {
    files: Files,
    watched: WatchedFiles,
    not_after: Option<i64>,
    workers: ServerTls,
    routers: ServerTls,
    ranks: ServerTls,
    clients: RwLock<Clients>,
    /// Limits the log lines about failed handshakes with servers.
    pub refusals: Mutex<RefusalLog>,
}

/// The TLS configurations made from the files.
struct Configs {
    servers: Servers,
    clients: Clients,
    not_after: Option<i64>,
}

#[derive(Debug)]
struct Servers {
    workers: ServerConfig,
    routers: ServerConfig,
    ranks: ServerConfig,
}

#[derive(Debug)]
struct Clients {
    conductor: Arc<ClientConfig>,
    worker: Arc<ClientConfig>,
    leader: Arc<ClientConfig>,
}

impl MutualTls {
    fn read(files: Files) -> Result<Self, Error> {
        let watched = WatchedFiles::new(vec![files.cert.clone(), files.key.clone(), files.ca.clone()]);
        let Configs { servers, clients, not_after } = files.configs()?;
        Ok(Self {
            files,
            watched,
            not_after,
            workers: ServerTls::new(servers.workers, true),
            routers: ServerTls::new(servers.routers, true),
            ranks: ServerTls::new(servers.ranks, true),
            clients: RwLock::new(clients),
            refusals: Mutex::default(),
        })
    }

    /// Reads the files again. Returns the Unix time in seconds at which the certificate expires.
    fn reload(&self) -> Result<Option<i64>, Error> {
        let Configs { servers, clients, not_after } = self.files.configs()?;
        self.workers.install(servers.workers);
        self.routers.install(servers.routers);
        self.ranks.install(servers.ranks);
        *self.clients.write() = clients;
        Ok(not_after)
    }

    /// The configuration of connections to a process of this role.
    pub fn client(&self, to: Role) -> Arc<ClientConfig> {
        let clients = self.clients.read();
        match to {
            Role::Conductor => clients.conductor.clone(),
            Role::Worker | Role::Router => clients.worker.clone(),
        }
    }
}

impl Files {
    fn configs(&self) -> Result<Configs, Error> {
        let cert = File { field: "cluster_tls_cert", path: &self.cert };
        let key = File { field: "cluster_tls_key", path: &self.key };
        let ca = File { field: "cluster_tls_ca", path: &self.ca };
        let (Identity { resolver, not_after }, roots) = (identity(cert, key)?, authorities(ca)?);
        let unusable = |e: &dyn fmt::Display| Error::internal(format!("TLS cannot be set up: {e}"));
        let server = |peers: Role, protocols: &[&[u8]]| {
            let verifier = roles::clients(peers, roots.clone()).map_err(|e| unusable(&e))?;
            let builder = ServerConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .map_err(|e| unusable(&e))?;
            let mut config = builder.with_client_cert_verifier(verifier).with_cert_resolver(resolver.clone());
            config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            // A resumed session would skip the check of the client's certificate, which may have expired meanwhile.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
            Ok::<_, Error>(config)
        };
        let client = |to: Role, protocols: &[&[u8]]| {
            let verifier = roles::servers(to, roots.clone()).map_err(|e| unusable(&e))?;
            let builder = ClientConfig::builder_with_provider(provider())
                .with_safe_default_protocol_versions()
                .map_err(|e| unusable(&e))?;
            let mut config = builder
                .dangerous()
                .with_custom_certificate_verifier(verifier)
                .with_client_cert_resolver(resolver.clone());
            config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
            config.resumption = Resumption::disabled();
            Ok::<_, Error>(Arc::new(config))
        };
        let servers = Servers {
            workers: server(Role::Worker, GRPC)?,
            routers: server(Role::Router, GRPC)?,
            ranks: server(Role::Worker, RANKS)?,
        };
        let clients = Clients {
            conductor: client(Role::Conductor, GRPC)?,
            worker: client(Role::Worker, GRPC)?,
            leader: client(Role::Worker, RANKS)?,
        };
        Ok(Configs { servers, clients, not_after })
    }
}
