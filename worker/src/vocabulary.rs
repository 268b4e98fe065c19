//! The vocabulary of the checkpoint, from which masks are made.

use std::{path::Path, sync::Arc};

use tutti_constraints::{Declared, Vocabulary};
use tutti_engine::ReadVocabulary;
use tutti_models::Limits;
use tutti_runtime::checkpoint::{Checkpoint, CheckpointFile};

/// Returns the reader of the vocabulary of the checkpoint in a directory, served with these limits. It reads the file
/// when it is called.
pub fn reader(dir: &Path, limits: &Limits) -> ReadVocabulary {
    let (dir, limits) = (dir.to_owned(), limits.clone());
    Arc::new(move || read(&dir, &limits))
}

fn read(dir: &Path, limits: &Limits) -> Result<Vocabulary, String> {
    let name = CheckpointFile::Tokenizer.name();
    let checkpoint = Checkpoint::open(dir, String::new()).map_err(|error| error.to_string())?;
    let text = checkpoint.read(CheckpointFile::Tokenizer).map_err(|error| error.to_string())?;
    let text = text.ok_or_else(|| format!("needs a tokenizer, and the checkpoint has no {name}"))?;
    let json = serde_json::from_slice(&text).map_err(|error| format!("{name} is no JSON: {error}"))?;
    let declared = Declared { logits: limits.vocab_size, ends: &limits.eos_token_ids, markers: &[] };
    Vocabulary::from_tokenizer_json(&json, &declared).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
