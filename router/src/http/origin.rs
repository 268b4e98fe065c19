//! Protects a front door without API keys against requests of foreign web pages.
//!
//! A browser sends the requests of any web page to any address that the machine can reach. So a foreign page could use
//! a developer's local server without the developer's knowledge. Browsers state the origin of a request in the header
//! `Origin` or `Sec-Fetch-Site`. Clients that send neither header are admitted. With API keys this check is
//! unnecessary, because a foreign page does not know a key.

use axum::http::{HeaderMap, HeaderName, Uri, header, uri::Authority};
use tutti_runtime::{Error, ErrorKind};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Refuses a request of a web page, unless the page comes from this server or from one of the `allowed` origins, such
/// as `https://chat.example.com`.
pub fn check(uri: &Uri, headers: &HeaderMap, allowed: &[String]) -> Result<(), Error> {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let (origin, site) = (text(header::ORIGIN), text(SEC_FETCH_SITE));
    if origin.is_none() && site.is_none() {
        return Ok(());
    }
    check_content_type(text(header::CONTENT_TYPE))?;
    if origin.is_some_and(|origin| is_allowed(origin, allowed)) {
        return Ok(());
    }
    // The host name of a foreign page may resolve to this machine (DNS rebinding). The browser then treats the page and
    // this server as one origin. But the request's `Host` is a name that is neither an IP address nor `localhost`.
    let host = uri.authority().map(Authority::as_str).or(text(header::HOST)).unwrap_or_default();
    if !is_address(host) {
        let message = format!("a browser's request to the host {host:?} is refused without API keys");
        return Err(refused(message));
    }
    let same = match origin {
        Some(origin) => origin.split_once("://").is_some_and(|(_, authority)| authority == host),
        None => matches!(site, Some("same-origin" | "none")),
    };
    if same {
        return Ok(());
    }
    let from = origin.unwrap_or("another site");
    Err(refused(format!("a web page of {from:?} may not send requests here without API keys")))
}

/// True if an origin is one of the `allowed` ones.
pub fn is_allowed(origin: &str, allowed: &[String]) -> bool {
    allowed.iter().any(|allowed| allowed.trim_end_matches('/') == origin)
}

/// Refuses the content types that a browser sends to another origin without a CORS preflight request.
fn check_content_type(given: Option<&str>) -> Result<(), Error> {
    let Some(given) = given else { return Ok(()) };
    let kind = given.split(';').next().unwrap_or_default().trim();
    let simple = ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"];
    match simple.iter().find(|simple| simple.eq_ignore_ascii_case(kind)) {
        Some(simple) => {
            Err(refused(format!("a browser's request must be application/json, and not {simple}")))
        }
        None => Ok(()),
    }
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Forbidden, format!("{message} (see allowed_origins)"))
}

/// True if a host is an IP address, `localhost`, or a name that ends in `.localhost`.
fn is_address(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    bare.parse::<std::net::IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || name.to_ascii_lowercase().ends_with(".localhost")
}

#[cfg(test)]
mod tests;
