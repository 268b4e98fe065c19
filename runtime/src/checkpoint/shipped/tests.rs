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
    for file in [CheckpointFile::GenerationConfig, CheckpointFile::Tokenizer, CheckpointFile::TokenizerConfig]
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

#[test]
fn a_link_in_the_way_of_a_file_is_not_followed() {
    let (cache, victim) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
    fs::write(victim.path(), "a year of work").unwrap();
    let dir = unpack_files(cache.path(), &SMALL).unwrap();
    let config = dir.join("config.json");
    fs::remove_file(&config).unwrap();
    let temporary = config.with_extension(format!("{}.part", std::process::id()));
    std::os::unix::fs::symlink(victim.path(), temporary).unwrap();
    unpack_files(cache.path(), &SMALL).unwrap();
    assert_eq!(fs::read(&config).unwrap(), b"{}");
    assert_eq!(fs::read_to_string(victim.path()).unwrap(), "a year of work");
}
