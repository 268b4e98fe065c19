//! The text files of conductors, and what they are read into.
//!
//! A tokenizer takes a moment to read, a worker many to load. So a router reads the files of a conductor that is still
//! starting, and one that is part of a conductor is given what that has read. What counts is what a conductor offers once
//! it says what it serves: text that was read ahead is used if it is of the same files.

use std::sync::Arc;

use parking_lot::Mutex;
use tutti_runtime::Error;

use super::member::Member;
use crate::served::{CheckedText, ServedText, TextFiles};

/// The texts that a router knows of.
pub struct Texts {
    skip_tokenizer_init: bool,
    /// Of the conductor that the router is part of.
    own: Option<CheckedText>,
    ahead: Mutex<Option<Ahead>>,
}

/// Files that were read before their conductor said what it serves.
struct Ahead {
    digest: u64,
    /// None where they are broken, which is told when they are offered.
    text: Option<Arc<ServedText>>,
}

/// What a conductor has for its model.
pub enum Offer {
    Read(CheckedText),
    Files(u64, TextFiles),
}

impl Offer {
    /// By which it is compared with others; see [`TextFiles::digest`].
    pub fn digest(&self) -> u64 {
        match self {
            Self::Read(text) => text.digest,
            Self::Files(digest, _) => *digest,
        }
    }
}

impl Texts {
    /// Nothing is known, unless `own` of a router's only conductor.
    pub fn new(skip_tokenizer_init: bool, own: Option<CheckedText>) -> Self {
        Self { skip_tokenizer_init, own, ahead: Mutex::default() }
    }

    /// What this conductor offers now.
    pub async fn offer(&self, member: &Member) -> Result<Offer, Error> {
        if let Some(own) = &self.own {
            return Ok(Offer::Read(own.clone()));
        }
        let files = TextFiles::fetch(member, self.skip_tokenizer_init).await?;
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

    /// Makes text of an offer that is taken.
    pub async fn read(&self, offer: Offer) -> Result<Arc<ServedText>, Error> {
        let text = match offer {
            Offer::Read(checked) => checked.text,
            Offer::Files(_, files) => read(files, self.skip_tokenizer_init).await?.text,
        };
        // Of no use any more, and tokenizers are large.
        *self.ahead.lock() = None;
        Ok(text)
    }

    /// Reads the files of a conductor that does not say yet what it serves; once, whatever comes of it.
    pub async fn read_ahead(&self, member: &Member) {
        if self.own.is_some() || self.ahead.lock().is_some() {
            return;
        }
        // One that cannot be reached will be asked again.
        if let Ok(files) = TextFiles::fetch(member, self.skip_tokenizer_init).await {
            self.keep_ahead(files).await;
        }
    }

    async fn keep_ahead(&self, files: TextFiles) {
        let digest = files.digest();
        let text = read(files, self.skip_tokenizer_init).await.ok().map(|checked| checked.text);
        *self.ahead.lock() = Some(Ahead { digest, text });
    }
}

/// On a thread that may block.
async fn read(files: TextFiles, skip_tokenizer_init: bool) -> Result<CheckedText, Error> {
    tokio::task::spawn_blocking(move || CheckedText::read(&files, skip_tokenizer_init))
        .await
        .map_err(|e| Error::internal(format!("reading the tokenizer failed: {e}")))?
}

#[cfg(test)]
mod tests;
