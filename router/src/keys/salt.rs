//! The salt of cached prefixes, by which no caller finds what another one has computed.
//!
//! A caller with an API key has the salt of its key's name, so that it is the same in all routers and stays when the
//! key is replaced. A client may give a salt of its own, which is combined with the key's: equal salts of two keys are
//! not equal, and no client can choose a salt that leads to another key's prefixes. Without a key, only the client's
//! own salt counts.

use ring::digest::{Context, SHA256, digest};
use tutti_proto::{CacheSalt, parameters::CACHE_SALT};
use tutti_runtime::Error;

/// The SHA-256 of a client's `cache_salt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientSalt([u8; 32]);

impl ClientSalt {
    /// Reads a request's `cache_salt`. Refuses an empty one, as vLLM does: it would separate nobody.
    pub fn new(text: &str) -> Result<Self, Error> {
        if text.is_empty() {
            return Err(Error::invalid(
                CACHE_SALT,
                "is an empty string; leave it out, or give at least one character",
            ));
        }
        let hash = digest(&SHA256, text.as_bytes());
        Ok(Self(hash.as_ref().first_chunk().copied().unwrap_or_default()))
    }
}

/// The salt of a caller with the key of this name, or without a key.
pub(super) fn of_caller(key: Option<&str>, client: Option<ClientSalt>) -> CacheSalt {
    if key.is_none() && client.is_none() {
        return CacheSalt::default();
    }
    let mut hash = Context::new(&SHA256);
    // A name is not empty and has no newline.
    hash.update(key.unwrap_or_default().as_bytes());
    hash.update(b"\n");
    client.iter().for_each(|salt| hash.update(&salt.0));
    CacheSalt::new(hash.finish().as_ref().first_chunk().copied().unwrap_or_default())
}

#[cfg(test)]
mod tests;
