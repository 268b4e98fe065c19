//! Secrets by which the processes of a cluster authenticate. They are sent as `authorization: Bearer` in the metadata
//! of a call, so that they are checked before any message of the call is read.

use std::{fmt, fs, path::Path, sync::Arc};

use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use ring::rand::{SecureRandom, SystemRandom};
use subtle::ConstantTimeEq;

use crate::Error;

/// A secret of 128 random bits. Generating a secret opens no file, because each request whose planes or embeddings are
/// transferred needs a secret.
///
/// # Errors
/// The system has no random numbers.
pub fn random_bytes() -> Result<[u8; 16], Error> {
    let mut bytes = [0; 16];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map(|()| bytes).map_err(|_| Error::internal("the system has no random numbers"))
}

/// The scheme of RFC 6750, section 2.1.
const SCHEME: &str = "Bearer ";

/// A secret. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    header: HeaderValue,
    text: Arc<str>,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// The secret of this text. `field` is the setting that an error names.
    pub fn new(field: &str, text: &str) -> Result<Self, Error> {
        let invalid = |_| Error::invalid(field, "the token has a character that is not printable ASCII");
        let mut header = HeaderValue::from_str(&format!("{SCHEME}{text}")).map_err(invalid)?;
        header.set_sensitive(true);
        Ok(Self { header, text: text.into() })
    }

    /// Reads the secret from the file that the setting `field` names. Surrounding white space is ignored.
    pub fn read(field: &str, path: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(path)
            .map_err(|e| Error::invalid(field, format!("cannot read {}: {e}", path.display())))?;
        match text.trim() {
            "" => Err(Error::invalid(field, format!("{} is empty", path.display()))),
            token => Self::new(field, token),
        }
    }

    /// The secret of these random bytes, in hexadecimal.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let header = HeaderValue::from_str(&format!("{SCHEME}{text}"));
        let mut header = header.unwrap_or_else(|_| HeaderValue::from_static(SCHEME));
        header.set_sensitive(true);
        Self { header, text: text.into() }
    }

    /// Adds the secret to the headers of a call.
    pub fn add_to(&self, headers: &mut HeaderMap) {
        headers.insert(AUTHORIZATION, self.header.clone());
    }

    /// True if the call carries this secret. The comparison takes constant time, so that timing does not reveal the
    /// first differing byte. An empty secret matches no call.
    pub fn is_in(&self, headers: &HeaderMap) -> bool {
        let is_shown = |shown: &[u8]| !shown.is_empty() && shown.ct_eq(self.text.as_bytes()).into();
        shown(headers).is_some_and(is_shown)
    }
}

/// The secret that a call carries; `None` if it carries none.
pub fn shown(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(AUTHORIZATION)?.as_bytes().strip_prefix(SCHEME.as_bytes())
}

#[cfg(test)]
mod tests;
