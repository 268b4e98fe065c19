//! Addresses of conductors: a list of URLs, and a DNS name that is looked up periodically.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use tonic::{body::Body, codegen::http::Request, transport::Endpoint};
use tower::ServiceExt;
use tutti_runtime::{Error, token::Token};

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
    /// The secret that calls to a conductor show; `None` if the conductors require none.
    pub token: Option<Token>,
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
        token: Option<Token>,
        settings: &FleetSettings,
    ) -> Result<Self, Error> {
        check(urls, discover)?;
        let named = |url: &String| Ok((url.clone(), connection(url, token.as_ref(), settings)?));
        let fixed = urls.iter().map(named).collect::<Result<_, Error>>()?;
        Ok(Self { fixed, discover: discover.map(str::to_owned), token })
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
        endpoint(url)?;
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

/// The URL of a discovered address.
pub fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

/// A channel that connects when it is first used, and reconnects whenever the connection breaks. Each call shows `token`.
pub fn connection(
    url: &str,
    token: Option<&Token>,
    settings: &FleetSettings,
) -> Result<ConductorChannel, Error> {
    let endpoint = tune(endpoint(url)?)
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(settings.keep_alive())
        .keep_alive_timeout(settings.keep_alive())
        .keep_alive_while_idle(true);
    let token = token.cloned();
    let show_token = move |mut request: Request<Body>| {
        token.iter().for_each(|token| token.add_to(request.headers_mut()));
        request
    };
    Ok(conductor_channel::over(endpoint.connect_lazy().map_request(show_token)))
}

fn endpoint(url: &str) -> Result<Endpoint, Error> {
    let invalid = || {
        Error::invalid(
            "conductor",
            format!("{url:?} is not a URL such as http://10.0.0.1:50052 or unix:/path"),
        )
    };
    if !url.starts_with("http://") && !url.starts_with("unix:/") {
        return Err(invalid());
    }
    Endpoint::from_shared(url.to_owned()).map_err(|_| invalid())
}

#[cfg(test)]
mod tests;
