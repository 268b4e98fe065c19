//! Where conductors are: URLs given one by one, and a name whose addresses are looked up again and again.

use std::{collections::BTreeSet, net::SocketAddr, time::Duration};

use tonic::transport::Endpoint;
use tutti_runtime::Error;

use super::FleetSettings;
use crate::{
    tune,
    way::{self, Way},
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The conductors of a router.
#[derive(Debug, Default)]
pub struct Conductors {
    /// Those that are always part of it, each with the name that operators know it by.
    pub fixed: Vec<(String, Way)>,
    /// `HOST:PORT`: every address behind the name is one.
    pub discover: Option<String>,
}

impl Conductors {
    /// Those at these URLs, and those behind this name. None of them needs to be there yet. Must be called inside a
    /// Tokio runtime.
    ///
    /// # Errors
    /// That name the setting, `conductor` or `discover`.
    pub fn new(urls: &[String], discover: Option<&str>, settings: &FleetSettings) -> Result<Self, Error> {
        check(urls, discover)?;
        let named = |url: &String| Ok((url.clone(), connection(url, settings)?));
        let fixed = urls.iter().map(named).collect::<Result<_, Error>>()?;
        Ok(Self { fixed, discover: discover.map(str::to_owned) })
    }
}

/// Refuses what no conductor can be reached by.
pub fn check(urls: &[String], discover: Option<&str>) -> Result<(), Error> {
    if urls.is_empty() && discover.is_none() {
        let message = "is required: the gRPC address of a conductor, unless --discover names them";
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
        _ => Err(Error::invalid("discover", format!("{name:?} is not a HOST:PORT such as conductors:50051"))),
    }
}

/// The URL of a discovered address.
pub fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

/// A way there that connects when it is first used, and again whenever it breaks.
pub fn connection(url: &str, settings: &FleetSettings) -> Result<Way, Error> {
    let endpoint = tune(endpoint(url)?)
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(settings.keep_alive())
        .keep_alive_timeout(settings.keep_alive())
        .keep_alive_while_idle(true);
    Ok(way::through(endpoint.connect_lazy()))
}

fn endpoint(url: &str) -> Result<Endpoint, Error> {
    let invalid =
        || Error::invalid("conductor", format!("{url:?} is not a URL such as http://10.0.0.1:50051"));
    if !url.starts_with("http://") {
        return Err(invalid());
    }
    Endpoint::from_shared(url.to_owned()).map_err(|_| invalid())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(urls: &[&str], discover: Option<&str>) -> Option<String> {
        let urls: Vec<String> = urls.iter().map(|url| (*url).to_owned()).collect();
        check(&urls, discover).err().and_then(|error| error.field().map(str::to_owned))
    }

    #[test]
    fn what_cannot_be_reached_is_refused_by_the_setting_s_name() {
        assert_eq!(refused(&["http://a:1", "http://b:1"], Some("conductors:50051")), None);
        assert_eq!(refused(&[], Some("[::1]:50051")), None);
        for urls in [&[][..], &["a:1"], &["ftp://a:1"], &["http://x y"], &["http://a:1", "http://a:1"]] {
            assert_eq!(refused(urls, None).as_deref(), Some("conductor"), "{urls:?}");
        }
        for name in ["conductors", ":1", "conductors:", "conductors:0", "conductors:70000"] {
            assert_eq!(refused(&[], Some(name)).as_deref(), Some("discover"), "{name:?}");
        }
    }
}
