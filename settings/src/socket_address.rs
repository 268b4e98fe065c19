//! The addresses of listeners in the forms that users write: `127.0.0.1:8000`, `:8000`, `8000`, `localhost:8000`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Parses an address. A port alone is one of this machine alone, as the defaults are. As in other servers, a colon and
/// a port are all addresses of IPv4. No name but `localhost` is looked up.
pub(crate) fn parse(text: &str) -> Result<SocketAddr, String> {
    let text = text.trim();
    let refused =
        |why: &str| Err(format!("{text:?} {why}: give IP:PORT, :PORT for all addresses, or localhost:PORT"));
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    }
    if text.is_empty() {
        return refused("is no address");
    }
    if let Some((scheme, _)) = text.split_once("://") {
        return refused(&format!("has a scheme, {scheme}"));
    }
    let without_port = |text: &str| text.parse::<IpAddr>().is_ok();
    if without_port(text.trim_start_matches('[').trim_end_matches(']')) {
        return refused("has no port");
    }
    let Some((host, port)) = text.rsplit_once(':') else {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        return refused(if is_number { "is no port from 0 to 65535" } else { "has no port" });
    };
    let Ok(port) = port.parse::<u16>() else { return refused("has no port from 0 to 65535 after its colon") };
    match host {
        "" | "*" => Ok(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))),
        host if host.eq_ignore_ascii_case("localhost") => Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        _ => refused("has no IP address"),
    }
}

#[cfg(test)]
mod tests;
