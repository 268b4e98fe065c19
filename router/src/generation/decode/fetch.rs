//! Fetches the files whose URLs a request names, from the origins that the settings allow.
//!
//! A server that fetches what its clients name reaches what only it can reach. So an origin must be in `media_origins`,
//! no redirect is followed, no proxy is used, and a host name must stand for public addresses alone, which are looked
//! up once for each connection. An operator who means a private address writes the address.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, OnceLock},
    time::Duration,
};

use reqwest::{
    Client, Response, Url,
    dns::{Addrs, Name, Resolve, Resolving},
    redirect::Policy,
};
use tokio::time::{Instant, timeout_at};
use tutti_media::{MediaError, Memory};
use tutti_runtime::Error;
use tutti_settings::RouterSettings;

use super::{super::request::Media, memory::MediaLease};

/// The name that may stand for an address of the machine itself, because it says so.
const LOCALHOST: &str = "localhost";
/// Room for the first bytes of a file whose size the server does not tell.
const FIRST_BYTES: usize = 64 << 10;

/// Refuses the URL of an item whose origin is not in `media_origins`.
pub(super) fn check(path: &str, url: &Url, limits: &RouterSettings) -> Result<(), Error> {
    let refused = |message: String| Err(Error::invalid(format!("{path}.url"), message));
    if !url.username().is_empty() || url.password().is_some() {
        return refused("has a user name or a password, which are sent to no server".into());
    }
    let origin = url.origin().ascii_serialization();
    if limits.media_origins.iter().any(|allowed| allowed.trim_end_matches('/') == origin) {
        return Ok(());
    }
    refused(format!("is of {origin}, which is not in media_origins, so it is not fetched: send the data"))
}

/// Fetches files.
#[derive(Default)]
pub(super) struct Fetcher {
    /// Made for the first file that is fetched, because most routers fetch none.
    client: OnceLock<Client>,
}

/// The files of a request that are fetched, and their limits.
pub(super) struct Fetches<'a> {
    pub media: &'a mut [Media],
    /// Maximum number of bytes of all files together.
    pub max_bytes: usize,
    /// Time for all files together.
    pub timeout: Duration,
}

impl Fetcher {
    /// Fetches the files of all items that have a URL, one after the other, into their data.
    pub async fn fetch(&self, fetches: Fetches<'_>, lease: &mut MediaLease) -> Result<(), Error> {
        let Fetches { media, max_bytes, timeout: limit } = fetches;
        let mut left = max_bytes;
        let deadline = Instant::now() + limit;
        for item in media {
            let Some(url) = item.url.take() else { continue };
            let path = format!("{}.url", item.path);
            let file = File { path: &path, left, max_bytes };
            let fetched = timeout_at(deadline, file.fetch(self.client()?, url, lease));
            let data = fetched.await.map_err(|_| {
                let ms = limit.as_millis();
                let message =
                    format!("was not fetched within {ms} ms (media_fetch_timeout_ms) of the request");
                Error::invalid(&path, message)
            })??;
            left -= data.len();
            item.data = vec![data];
        }
        Ok(())
    }

    fn client(&self) -> Result<&Client, Error> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let client = Client::builder()
            .redirect(Policy::none())
            .no_proxy()
            .referer(false)
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .dns_resolver(Arc::new(PublicAddresses))
            .build()
            .map_err(|e| Error::internal(format!("media cannot be fetched: {e}")))?;
        Ok(self.client.get_or_init(|| client))
    }
}

/// A file to fetch.
struct File<'a> {
    path: &'a str,
    /// Bytes that are left to the request.
    left: usize,
    max_bytes: usize,
}

impl File<'_> {
    async fn fetch(&self, client: &Client, url: Url, lease: &mut MediaLease) -> Result<Vec<u8>, Error> {
        let failed = |error: reqwest::Error| self.refused(format!("cannot be fetched: {}", reason(&error)));
        let response = client.get(url).send().await.map_err(failed)?;
        let status = response.status();
        if status.is_redirection() {
            return Err(self.refused(format!("answers {status}, a redirect, which is not followed")));
        }
        if !status.is_success() {
            return Err(self.refused(format!("answers {status}")));
        }
        let known = response.content_length().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if known.is_some_and(|bytes| bytes > self.left) {
            return Err(self.too_large());
        }
        let mut body = Body { data: Vec::new(), lease, of: self };
        body.grow(known.unwrap_or(FIRST_BYTES).min(self.left))?;
        body.read(response).await
    }

    fn refused(&self, message: String) -> Error {
        Error::invalid(self.path, message)
    }

    fn too_large(&self) -> Error {
        let limit = self.max_bytes;
        self.refused(format!("is too large: all files of a request may have {limit} bytes (max_body_bytes)"))
    }
}

/// The bytes of a file that have arrived, in memory that was taken before it was allocated.
struct Body<'a> {
    data: Vec<u8>,
    lease: &'a mut MediaLease,
    of: &'a File<'a>,
}

impl Body<'_> {
    async fn read(mut self, mut response: Response) -> Result<Vec<u8>, Error> {
        loop {
            let piece = response.chunk().await;
            let piece = piece.map_err(|error| {
                self.of.refused(format!("cannot be fetched to its end: {}", reason(&error)))
            })?;
            let Some(piece) = piece else { break };
            let needed = self.data.len() + piece.len();
            if needed > self.of.left {
                return Err(self.of.too_large());
            }
            if needed > self.data.capacity() {
                self.grow(needed.max(2 * self.data.capacity()).min(self.of.left))?;
            }
            self.data.extend_from_slice(&piece);
        }
        // Decoding takes the file's own size as given back.
        let capacity = self.data.capacity();
        self.data.shrink_to_fit();
        self.lease.give(capacity - self.data.len());
        Ok(self.data)
    }

    /// Makes room for `capacity` bytes.
    fn grow(&mut self, capacity: usize) -> Result<(), Error> {
        let more = capacity.saturating_sub(self.data.capacity());
        if !self.lease.take(more) {
            return Err(self.lease.refused(self.of.path, MediaError::NoMemory(more)));
        }
        self.data.reserve_exact(capacity - self.data.len());
        Ok(())
    }
}

/// The innermost cause of an error, which names no address.
fn reason(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// Looks up host names, and refuses those that do not stand for public addresses alone.
struct PublicAddresses;

impl Resolve for PublicAddresses {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(look_up(name.as_str().to_owned()))
    }
}

async fn look_up(host: String) -> Result<Addrs, Box<dyn std::error::Error + Send + Sync>> {
    let found: Vec<_> = tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
    if host != LOCALHOST && !found.iter().all(|address| is_public(address.ip())) {
        return Err("the host has an address that is not public: media_origins must name the address".into());
    }
    Ok(Box::new(found.into_iter()))
}

/// True for addresses that any machine on the internet reaches.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// See IANA's registry of special-purpose IPv4 addresses.
fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || a == 0
        // Shared addresses of carriers.
        || (a == 100 && b & 0b1100_0000 == 64)
        // Assignments of protocols, and benchmarks.
        || (a, b, c) == (192, 0, 0)
        || (a == 198 && b & 0b1111_1110 == 18)
        // Multicast, reserved and broadcast.
        || a >= 224;
    !is_special
}

/// See IANA's registry of special-purpose IPv6 addresses. Only unicast addresses that are routed are public, and of
/// these not such as contain an IPv4 address that is not.
fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, ..] = address.segments();
    let inner = |at: usize| {
        let octets = address.octets();
        Ipv4Addr::new(octets[at], octets[at + 1], octets[at + 2], octets[at + 3])
    };
    match (a, b) {
        // Translation from IPv6 to IPv4, and 6to4.
        (0x64, 0xff9b) if address.segments()[2..6] == [0; 4] => is_public_v4(inner(12)),
        (0x2002, _) => is_public_v4(inner(2)),
        // Teredo, other assignments of protocols, and documentation.
        (0x2001, 0..=0x1ff | 0xdb8) | (0x3fff, 0..=0xfff) => false,
        // Global unicast. Mapped addresses, which the resolver does not return, are outside of it.
        _ => a & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests;
