//! Addresses of conductors: a list of URLs, and a DNS name that is looked up periodically.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use tonic::{body::Body, codegen::http::Request};
use tower::ServiceExt;
use tutti_runtime::{
    Error,
    tls::{self, ClusterTransport, Dial, roles::Role},
    token::Token,
};

use super::FleetSettings;
use crate::{
    conductor_channel::{self, ConductorChannel},
    tune,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The conductors of a router.
#[derive(Debug, Default)]
pub struct Conductors {
    /// Permanent conductors, each with its name in logs and metrics.
    pub fixed: Vec<(String, ConductorChannel)>,
    /// `HOST:PORT`, looked up by DNS. Every address of the host is a conductor.
    pub discover: Option<String>,
    /// Credentials and encryption of the connections to the conductors.
    pub access: Access,
}

/// Credentials and encryption of connections to conductors.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The secret that each call carries; `None` if the conductors require none.
    pub token: Option<Token>,
    /// Encryption of the connections.
    pub transport: ClusterTransport,
}

#[cfg(test)]
impl Access {
    /// Access to any host, without encryption and without a secret.
    pub fn insecure() -> Self {
        let insecure_plaintext = true;
        let settings = tutti_settings::ClusterTlsSettings { insecure_plaintext, ..Default::default() };
        Self { token: None, transport: ClusterTransport::read(&settings).unwrap() }
    }
}

impl Conductors {
    /// The conductors at `urls`, and those found by DNS lookup of `discover`. They need not be reachable yet. Must be
    /// called inside a Tokio runtime.
    ///
    /// # Errors
    /// Names the setting at fault, `conductor` or `discover`.
    pub fn new(
        urls: &[String],
        discover: Option<&str>,
        access: Access,
        settings: &FleetSettings,
    ) -> Result<Self, Error> {
        check(urls, discover)?;
        let named = |url: &String| Ok((url.clone(), connection(url, &access, settings)?));
        let fixed = urls.iter().map(named).collect::<Result<_, Error>>()?;
        Ok(Self { fixed, discover: discover.map(str::to_owned), access })
    }
}

/// Validates the settings `conductor` and `discover`.
pub fn check(urls: &[String], discover: Option<&str>) -> Result<(), Error> {
    if urls.is_empty() && discover.is_none() {
        let message = "is required: the cluster address of a conductor, unless --discover names them";
        return Err(Error::invalid("conductor", message));
    }
    let mut seen = BTreeSet::new();
    for url in urls {
        tls::check_url("conductor", url)?;
        if !seen.insert(url) {
            return Err(Error::invalid("conductor", format!("{url:?} is given twice")));
        }
    }
    let Some(name) = discover else { return Ok(()) };
    match name.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) => Ok(()),
        _ => Err(Error::invalid("discover", format!("{name:?} is not a HOST:PORT such as conductors:50052"))),
    }
}

/// Returns an error if a conductor can be reached only without encryption and `transport` does not allow that.
pub fn check_reach(
    urls: &[String],
    discover: Option<&str>,
    transport: &ClusterTransport,
) -> Result<(), Error> {
    for url in urls {
        transport.dial("conductor", url, Role::Conductor)?;
    }
    discover.map_or(Ok(()), |name| transport.check_dial("discover", name))
}

/// The URL of a discovered address.
pub fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

/// A channel that connects when it is first used, and reconnects whenever the connection breaks. Each call carries the
/// token of `access`.
pub fn connection(url: &str, access: &Access, settings: &FleetSettings) -> Result<ConductorChannel, Error> {
    let dial: Dial = access.transport.dial("conductor", url, Role::Conductor)?.tuned(|endpoint| {
        tune(endpoint)
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(settings.keep_alive())
            .keep_alive_timeout(settings.keep_alive())
            .keep_alive_while_idle(true)
    });
    let token = access.token.clone();
    let show_token = move |mut request: Request<Body>| {
        token.iter().for_each(|token| token.add_to(request.headers_mut()));
        request
    };
    Ok(conductor_channel::over(dial.connect_lazy().map_request(show_token)))
}

#[cfg(test)]
mod tests;
