//! The salt of cached prefixes: it keeps callers apart whose prompts begin alike.

use tutti_parameters::{CACHE_SALT, Refused};

/// Bytes of a salt in messages.
const BYTES: usize = 16;

/// The part of a prefix's identity that is not in its tokens. Only requests with equal salts share cached prefixes.
/// The default is the salt of callers without an API key that ask for none.
///
/// A router computes it from the API key and the `cache_salt` of a request. All other processes only compare it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt(Option<[u8; BYTES]>);

impl CacheSalt {
    /// The salt with these bytes.
    pub fn new(bytes: [u8; BYTES]) -> Self {
        Self(Some(bytes))
    }

    /// Reads a salt from a message.
    pub fn from_message(bytes: &[u8]) -> Result<Self, Refused> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let salt = bytes.try_into().map_err(|_| {
            Refused::new(CACHE_SALT, format!("has {} bytes, but must have {BYTES} or none", bytes.len()))
        })?;
        Ok(Self::new(salt))
    }

    /// The salt as it stands in messages.
    pub fn to_message(self) -> Vec<u8> {
        self.0.map_or_else(Vec::new, Vec::from)
    }

    /// The salt as words, which are part of the content of a prompt's first block. None for the default.
    pub fn words(self) -> impl Iterator<Item = u32> {
        let words = |bytes: [u8; BYTES]| {
            bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
        };
        self.0.map_or_else(Vec::new, words).into_iter()
    }

    /// Beginning of the hash of a prompt's pieces; 0 for the default.
    pub fn hash_seed(self) -> u64 {
        self.0.and_then(|bytes| bytes.first_chunk().copied()).map_or(0, u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests;
