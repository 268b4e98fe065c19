use super::*;

#[test]
fn weights_of_other_formats_are_named_with_a_remedy() {
    for (names, words) in [
        (
            &["config.json", "pytorch_model-00001-of-00002.bin"][..],
            ["pytorch_model-00001", "save_pretrained"],
        ),
        (&["model.Q4_K_M.gguf", "README.md"], ["model.Q4_K_M.gguf", "beside other files"]),
        (&["adapter_config.json", "adapter_model.bin"], ["adapter_config.json", "merged"]),
        (&["consolidated.safetensors", "params.json"], ["consolidated.safetensors", "Hugging Face"]),
        (&["model_index.json", "unet"], ["model_index.json", "diffusers"]),
        (&["blobs", "refs", "snapshots"], ["snapshots", "hub id"]),
        (&["tf_model.h5"], ["tf_model.h5", "not read"]),
        (&["model-00001-of-00002.safetensors"], ["model-00001-of-00002", "no index"]),
    ] {
        let said = of_names(names.iter().copied()).unwrap();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
    assert_eq!(of_names(["README.md", "training_args.bin"].into_iter()), None);
    assert_eq!(of_names(["model.safetensors", "pytorch_model.bin"].into_iter()), None);
}

#[test]
fn a_folder_is_read_like_a_list() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(of_folder(dir.path()), None);
    fs::write(dir.path().join("a.gguf"), "").unwrap();
    assert!(of_folder(dir.path()).unwrap().contains("a.gguf"));
    assert_eq!(of_folder(&dir.path().join("gone")), None);
}

#[test]
fn a_pointer_of_git_lfs_is_recognised_by_its_first_line() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n";
    assert!(lfs_pointer(pointer).unwrap().contains("git lfs pull"));
    assert_eq!(lfs_pointer(b"{}"), None);
    assert_eq!(lfs_pointer(b""), None);
}
