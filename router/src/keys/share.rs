//! Shares of callers, by which waiting work is divided fairly.

use std::net::IpAddr;

use ring::digest::{SHA256, digest};
use tutti_runtime::serve::Peer;

/// A caller's share. Each API key has its own share. All callers without a key have one share together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Share(u64);

impl Share {
    /// The share of all callers without a key.
    pub const WITHOUT_KEY: Self = Self(0);

    /// The share of a key. It is a hash of the key's name, so that all routers compute the same share.
    pub fn of_key(name: &str) -> Self {
        Self::hashed(name.as_bytes())
    }

    /// The share of this router's callers at an address, for work that a caller without a key may repeat at no cost to
    /// itself. Names of keys have no zero byte, so no key has this share.
    pub fn of_address(address: IpAddr) -> Self {
        Self::hashed(format!("\0{}", Peer::network(address)).as_bytes())
    }

    fn hashed(name: &[u8]) -> Self {
        let hash = digest(&SHA256, name);
        Self(hash.as_ref().first_chunk().map_or(1, |start| u64::from_be_bytes(*start)).max(1))
    }

    /// True if this is the share of a key.
    pub fn is_of_key(self) -> bool {
        self != Self::WITHOUT_KEY
    }

    /// The share's number in messages to conductors; 0 without a key.
    pub fn number(self) -> u64 {
        self.0
    }
}
