use super::*;

#[test]
fn a_directory_wins_over_a_hub_id_and_a_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    assert_eq!(ModelSource::parse(Some(path)), Ok(ModelSource::Directory(dir.path().into())));
    let file = dir.path().join("model.safetensors");
    fs::write(&file, b"").unwrap();
    let error = ModelSource::parse(file.to_str()).unwrap_err();
    assert!(error.message().contains("is a file"), "{error}");
    assert_eq!(ModelSource::parse(None), Ok(ModelSource::Shipped));
}

#[test]
fn what_is_no_directory_must_be_a_hub_id() {
    let id = |text: &str| ModelSource::parse(Some(text));
    assert!(matches!(id("some-org/Some.Model_1"), Ok(ModelSource::Hub(_))));
    assert!(matches!(id("some-model-that-is-no-directory"), Ok(ModelSource::Hub(_))));
    for file in ["org/name/model-Q4_0.gguf", "org/name/Q4_0/model-00001-of-00002.gguf"] {
        assert!(matches!(id(file), Ok(ModelSource::Hub(id)) if id.to_string() == file));
    }
    for bad in [
        "/no/such/dir",
        "org/name/model.bin",
        "org/name/../model.gguf",
        "org/name/.gguf",
        "org/name//model.gguf",
        "org/na..me/model.gguf",
        "./nowhere",
        "a/b/c",
        "a/",
        "",
        "a b",
        "a..b",
        "a--b/c",
        ".x",
        "x.git",
        "https://h/x",
    ] {
        let error = id(bad).unwrap_err();
        assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("model")), "{bad}");
        assert!(error.message().contains(&format!("{bad:?}")), "{error}");
    }
}

#[test]
fn a_directory_without_a_config_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path(), "x").unwrap_err();
    assert!(error.message().contains("no config.json"), "{error}");
}

#[test]
fn a_missing_file_is_none() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), b"{}").unwrap();
    let checkpoint = Checkpoint::open(dir.path(), "x").unwrap();
    assert_eq!(checkpoint.read(CheckpointFile::Config), Ok(Some(b"{}".to_vec())));
    assert_eq!(checkpoint.read(CheckpointFile::Tokenizer), Ok(None));
}

#[test]
fn a_cache_below_the_temporary_directory_is_this_users_alone() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let parent = tempfile::tempdir().unwrap();
    let cache = parent.path().join("cache");
    make_private(&cache).unwrap();
    assert_eq!(cache.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    make_private(&cache).unwrap();
    std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(0o777)).unwrap();
    assert!(make_private(&cache).is_err(), "others may write to it");
    let link = parent.path().join("link");
    std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(0o700)).unwrap();
    symlink(&cache, &link).unwrap();
    assert!(make_private(&link).is_err(), "a link");
    let file = parent.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(make_private(&file).is_err(), "a file");
}

#[test]
fn a_folder_without_a_config_says_what_it_holds() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["model.Q4_K_M.gguf", "model.Q8_0.gguf"] {
        fs::write(dir.path().join(name), "GGUF").unwrap();
    }
    let error = Checkpoint::open(dir.path(), "x").unwrap_err();
    assert!(
        error.message().contains("no config.json") && error.message().contains("beside other files"),
        "{error}"
    );
    let file = dir.path().join("model.Q8_0.gguf");
    assert_eq!(ModelSource::parse(file.to_str()).unwrap(), ModelSource::Gguf(file.clone()));
    let error = Checkpoint::open(&file, "x").unwrap().read(CheckpointFile::Config).unwrap_err();
    assert!(error.message().contains("Q8_0.gguf") && error.message().contains("truncated"), "{error}");
}

#[test]
fn a_folder_with_one_gguf_file_or_one_split_file_has_that_file() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(gguf::only_file(dir.path()), None);
    let first = dir.path().join("m-00001-of-00002.gguf");
    let second = dir.path().join("m-00002-of-00002.gguf");
    fs::write(&first, "").unwrap();
    fs::write(&second, "").unwrap();
    assert_eq!(gguf::only_file(dir.path()), Some(first.clone()));
    assert_eq!(
        [gguf_files(&first), gguf_files(&second)],
        [vec![first.clone(), second.clone()], vec![first, second]]
    );
    fs::write(dir.path().join("other.gguf"), "").unwrap();
    assert_eq!(gguf::only_file(dir.path()), None);
    // Names that number no part are names of whole files.
    for name in ["other.gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf", "m-+0001-of-00002.gguf"] {
        let alone = dir.path().join(name);
        assert_eq!(gguf_files(&alone), [alone]);
    }
}

#[test]
fn a_text_file_that_is_a_pointer_of_git_lfs_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    fs::write(
        dir.path().join("tokenizer.json"),
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
    )
    .unwrap();
    let error = Checkpoint::open(dir.path(), "x").unwrap().read(CheckpointFile::Tokenizer).unwrap_err();
    assert!(error.message().contains("tokenizer.json is a pointer of git-lfs"), "{error}");
}
