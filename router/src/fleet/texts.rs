//! The text files of conductors (tokenizer, chat template, generation config) and the parsed text.
//!
//! Parsing a tokenizer takes time, but less time than loading a worker. So a router parses a conductor's files while
//! the conductor is still starting. An embedded router gets the text that its conductor has parsed. Text that was
//! parsed ahead is used only if the conductor later serves the same files.

use std::sync::Arc;

use parking_lot::Mutex;
use tutti_runtime::Error;

use super::member::Member;
use crate::served::{CheckedText, ServedText, TextFiles, TextSettings};

/// The texts that a router has parsed.
pub struct Texts {
    settings: TextSettings,
    /// In an embedded router: the tokenizer and chat template that its conductor has already parsed, if known.
    own: Option<CheckedText>,
    ahead: Mutex<Option<Ahead>>,
}

/// Files that were parsed before their conductor described its model.
struct Ahead {
    digest: u64,
    /// `None` if the files could not be parsed. If the conductor offers the same files, they are parsed again, and the
    /// error is reported then.
    text: Option<Arc<ServedText>>,
}

/// The text that a conductor offers for its model.
pub enum Offer {
    /// Text that is parsed already.
    Read(CheckedText),
    /// Files that are not parsed yet, with their digest.
    Files(u64, TextFiles),
}

impl Offer {
    /// Digest of the files; see [`TextFiles::digest`].
    pub fn digest(&self) -> u64 {
        match self {
            Self::Read(text) => text.digest,
            Self::Files(digest, _) => *digest,
        }
    }
}

impl Texts {
    /// Creates the state without any text. `own` is the text of an embedded router's conductor, if known.
    pub fn new(settings: TextSettings, own: Option<CheckedText>) -> Self {
        Self { settings, own, ahead: Mutex::default() }
    }

    /// Returns the conductor's current offer of text. An embedded router returns its own text without a fetch.
    pub async fn offer(&self, member: &Member) -> Result<Offer, Error> {
        if let Some(own) = &self.own {
            return Ok(Offer::Read(own.clone()));
        }
        let files = TextFiles::fetch(member, &self.settings).await?;
        Ok(self.offer_of(files))
    }

    fn offer_of(&self, files: TextFiles) -> Offer {
        let digest = files.digest();
        let ahead = self.ahead.lock();
        let same = ahead.as_ref().filter(|ahead| ahead.digest == digest);
        match same.and_then(|ahead| ahead.text.clone()) {
            Some(text) => Offer::Read(CheckedText { digest, text }),
            None => Offer::Files(digest, files),
        }
    }

    /// Returns the text of an accepted offer. Parses the files unless they are parsed already.
    pub async fn read(&self, offer: Offer) -> Result<Arc<ServedText>, Error> {
        let text = match offer {
            Offer::Read(checked) => checked.text,
            Offer::Files(_, files) => read(files, self.settings.clone()).await?.text,
        };
        // Text that was parsed ahead is no longer needed. It is dropped, because tokenizers are large.
        *self.ahead.lock() = None;
        Ok(text)
    }

    /// Parses the files of a conductor that has not described its model yet. The files are parsed at most once, even if
    /// parsing fails.
    pub async fn read_ahead(&self, member: &Member) {
        if self.own.is_some() || self.ahead.lock().is_some() {
            return;
        }
        // If the files cannot be fetched, the next call tries again.
        if let Ok(files) = TextFiles::fetch(member, &self.settings).await {
            self.keep_ahead(files).await;
        }
    }

    async fn keep_ahead(&self, files: TextFiles) {
        let digest = files.digest();
        let text = read(files, self.settings.clone()).await.ok().map(|checked| checked.text);
        *self.ahead.lock() = Some(Ahead { digest, text });
    }
}

/// Parses files on a thread that may block.
async fn read(files: TextFiles, settings: TextSettings) -> Result<CheckedText, Error> {
    tokio::task::spawn_blocking(move || CheckedText::read(&files, &settings))
        .await
        .map_err(|e| Error::internal(format!("reading the tokenizer failed: {e}")))?
}

#[cfg(test)]
mod tests;
