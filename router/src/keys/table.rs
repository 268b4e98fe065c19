//! The keys in force, looked up by a keyed hash. The time of a lookup does not depend on the number of keys, and
//! reveals nothing about a key.

use std::{collections::HashMap, sync::Arc};

use ring::{
    digest::{SHA256, digest},
    hmac,
    rand::SystemRandom,
};
use subtle::ConstantTimeEq;
use tutti_runtime::Error;

use super::{ApiKey, file::HASH_BYTES};

/// A key's index in the table: an HMAC of the key's hash, with a secret of this process. Without the secret, nobody can
/// choose a key whose index resembles that of another key.
type Index = [u8; HASH_BYTES];

/// The keys in force.
pub struct KeyTable {
    secret: hmac::Key,
    keys: HashMap<Index, Arc<ApiKey>>,
}

impl KeyTable {
    /// Creates a table without keys.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new() -> Result<Self, Error> {
        let secret = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new())
            .map_err(|_| Error::internal("the system has no random numbers for the table of API keys"))?;
        Ok(Self { secret, keys: HashMap::new() })
    }

    /// Returns a table with these keys and the secret of this table.
    pub fn with(&self, keys: impl IntoIterator<Item = Arc<ApiKey>>) -> Self {
        let keys = keys.into_iter().map(|key| (self.index(&key.line.hash), key)).collect();
        Self { secret: self.secret.clone(), keys }
    }

    /// All keys, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &Arc<ApiKey>> {
        self.keys.values()
    }

    /// Finds the key that a caller has sent.
    pub fn find(&self, shown: &str) -> Option<&Arc<ApiKey>> {
        let hash = digest(&SHA256, shown.as_bytes());
        let key = self.keys.get(&self.index(hash.as_ref()))?;
        bool::from(key.line.hash[..].ct_eq(hash.as_ref())).then_some(key)
    }

    fn index(&self, hash: &[u8]) -> Index {
        let mut index = Index::default();
        index.copy_from_slice(hmac::sign(&self.secret, hash).as_ref());
        index
    }
}
