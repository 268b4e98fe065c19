//! `tutti-tiny`, the small model in this binary, unpacked into the user's cache.

use std::{
    fs,
    hash::Hasher,
    io::{self, Write},
    path::{Path, PathBuf},
};

use crate::Error;

/// The model's name for clients.
pub(super) const NAME: &str = "tutti-tiny";

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../../tests/tutti-tiny/checkpoint/", $name)) as &[u8])),*]
    };
}

/// The model's files, made by tests/tutti-tiny/train.py.
const FILES: [(&str, &[u8]); 5] = shipped![
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
];

/// Writes the files to a directory in `cache`, unless the directory already has them. Returns the directory.
///
/// The directory's name has a hash of the contents, so that builds with different models do not disturb each other.
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

/// Writes `contents` to `path`. A file that already has these contents is left alone, since another process may have it
/// mapped. A file with other contents is replaced atomically.
fn put(path: &Path, contents: &[u8]) -> io::Result<()> {
    if fs::read(path).is_ok_and(|found| found == contents) {
        return Ok(());
    }
    let temporary = path.with_extension(format!("{}.part", std::process::id()));
    // An earlier process with the same id may have left a file. A link with that name is removed, not followed.
    let _ = fs::remove_file(&temporary);
    let mut file = fs::File::create_new(&temporary)?;
    file.write_all(contents)?;
    drop(file);
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests;
