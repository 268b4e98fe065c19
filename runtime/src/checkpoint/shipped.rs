//! `tutti-tiny`, the small model in this binary, unpacked into the user's cache.

use std::{
    fs,
    hash::Hasher,
    io::{self, Write},
    path::{Path, PathBuf},
};

use crate::Error;

/// What clients call it.
pub(super) const NAME: &str = "tutti-tiny";

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../../tests/tutti-tiny/checkpoint/", $name)) as &[u8])),*]
    };
}

/// Its files, made by tests/tutti-tiny/train.py.
const FILES: [(&str, &[u8]); 5] = shipped![
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
];

/// Writes the files below `cache`, unless they are there; gives back their directory.
///
/// The directory's name follows from the contents, so that builds with different models do not disturb each other.
pub(super) fn unpack(cache: &Path) -> Result<PathBuf, Error> {
    unpack_files(cache, &FILES)
}

fn unpack_files(cache: &Path, files: &[(&str, &[u8])]) -> Result<PathBuf, Error> {
    let mut hash = std::hash::DefaultHasher::new();
    for (name, contents) in files {
        hash.write(name.as_bytes());
        hash.write(contents);
    }
    let dir = cache.join("tutti").join(format!("{NAME}-{:016x}", hash.finish()));
    let written = fs::create_dir_all(&dir)
        .and_then(|()| files.iter().try_for_each(|(name, contents)| put(&dir.join(name), contents)));
    match written {
        Ok(()) => Ok(dir),
        Err(error) => {
            let message = format!(
                "cannot unpack the shipped model into {}: {error}; set XDG_CACHE_HOME to a directory that can be \
                 written, or give --model",
                dir.display()
            );
            Err(Error::invalid("model", message))
        }
    }
}

/// Makes `path` hold `contents`. A file that does already is left alone: another process may have it mapped. One that
/// does not is replaced as a whole, never half written.
fn put(path: &Path, contents: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|found| found == contents) {
        return Ok(());
    }
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    let mut file = fs::File::create(&temporary)?;
    file.write_all(contents)?;
    drop(file);
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Checkpoint, CheckpointFile};

    const SMALL: [(&str, &[u8]); 2] = [("config.json", b"{}"), ("model.safetensors", b"weights")];

    #[test]
    fn unpacking_twice_writes_once_and_repairs_what_was_damaged() {
        let cache = tempfile::tempdir().unwrap();
        let dir = unpack_files(cache.path(), &SMALL).unwrap();
        let (config, weights) = (dir.join("config.json"), dir.join("model.safetensors"));
        let before = fs::metadata(&config).unwrap().modified().unwrap();
        fs::write(&weights, b"weightz").unwrap();

        assert_eq!(unpack_files(cache.path(), &SMALL).unwrap(), dir);
        assert_eq!(fs::read(&weights).unwrap(), b"weights");
        assert_eq!(fs::metadata(&config).unwrap().modified().unwrap(), before);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), SMALL.len(), "no temporary file is left");
    }

    #[test]
    fn the_shipped_files_are_all_that_a_checkpoint_needs() {
        let cache = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&unpack(cache.path()).unwrap(), NAME).unwrap();
        for file in
            [CheckpointFile::GenerationConfig, CheckpointFile::Tokenizer, CheckpointFile::TokenizerConfig]
        {
            let text = checkpoint.read(file).unwrap().unwrap();
            serde_json::from_slice::<serde_json::Value>(&text).unwrap();
        }
        assert!(FILES.iter().map(|(_, contents)| contents.len()).sum::<usize>() <= 10_000_000);
    }

    #[test]
    fn other_contents_go_elsewhere() {
        let cache = tempfile::tempdir().unwrap();
        let other: [(&str, &[u8]); 1] = [("config.json", b"[]")];
        assert_ne!(unpack_files(cache.path(), &SMALL).unwrap(), unpack_files(cache.path(), &other).unwrap());
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_named() {
        let cache = tempfile::tempdir().unwrap();
        fs::write(cache.path().join("tutti"), b"in the way").unwrap();
        let error = unpack_files(cache.path(), &SMALL).unwrap_err();
        assert!(error.message().contains(cache.path().to_str().unwrap()), "{error}");
    }
}
