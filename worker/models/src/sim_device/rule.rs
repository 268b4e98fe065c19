//! The rule that gives a request's next token: a function of the digest, or a script of a test.

use std::path::Path;

use super::digest;
#[cfg(feature = "media-test-model")]
use super::script::Script;
use crate::LoadError;

/// The rule of a model. It keeps 8 bytes about the tokens of a request so far: the digest, or a script's state. Both
/// begin with [`digest::EMPTY`].
pub enum Rule {
    Digest,
    #[cfg(feature = "media-test-model")]
    Script(Script),
}

impl Rule {
    /// Returns the rule of the checkpoint in `dir`.
    #[cfg(feature = "media-test-model")]
    pub fn read(dir: &Path, vocab_size: usize) -> Result<Self, LoadError> {
        Ok(Script::read(dir, vocab_size)?.map_or(Self::Digest, Self::Script))
    }

    /// Returns the rule of every checkpoint of this build, which has no scripts.
    #[cfg(not(feature = "media-test-model"))]
    pub fn read(_: &Path, _: usize) -> Result<Self, LoadError> {
        Ok(Self::Digest)
    }

    /// Returns the digest or the state of a sequence extended by one token.
    pub fn extend(&self, digest: u64, token: u32) -> u64 {
        match self {
            Self::Digest => digest::extend(digest, token),
            #[cfg(feature = "media-test-model")]
            Self::Script(script) => script.extend(digest, token),
        }
    }

    /// Returns the token that follows a sequence. A script has no chance, so it ignores the seed.
    pub fn token(&self, digest: u64, seed: u64, vocab_size: u32) -> u32 {
        match self {
            Self::Digest => digest::token(digest, seed, vocab_size),
            #[cfg(feature = "media-test-model")]
            Self::Script(script) => script.token(digest),
        }
    }
}
