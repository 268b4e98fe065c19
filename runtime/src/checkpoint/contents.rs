//! Recognises folders and repositories that hold something else than a checkpoint that can be served.

use std::{fs, path::Path};

/// First bytes of a file that stands in for another in a repository of git-lfs.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Says that a file is a pointer of git-lfs, if it is one. `start` is at least the first line of the file.
pub fn lfs_pointer(start: &[u8]) -> Option<&'static str> {
    start.starts_with(LFS_POINTER).then_some(
        "is a pointer of git-lfs and not the file itself: run `git lfs pull` in its folder, or download the model \
         again",
    )
}

/// Says which weights or models of other formats a folder holds in place of weights that are read. `None` if it holds
/// weights that are read, or nothing that is known.
pub fn of_folder(dir: &Path) -> Option<String> {
    let entries = fs::read_dir(dir).ok()?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect();
    names.sort();
    of_names(names.iter().map(String::as_str))
}

/// Like [`of_folder`], for the names of the files in it.
pub fn of_names<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Option<String> {
    let find = |matches: &dyn Fn(&str) -> bool| names.clone().find(|name| matches(name));
    if find(&|name| name == "model.safetensors" || name == "model.safetensors.index.json").is_some() {
        return None;
    }
    let is = |wanted: &'static str| move |name: &str| name == wanted;
    if let Some(name) = find(&|name| name.ends_with(".gguf")) {
        return Some(format!("it holds {name} beside other files: give the path of the GGUF file"));
    }
    if let Some(name) = find(&is("adapter_config.json")) {
        return Some(format!(
            "it holds {name}: an adapter (LoRA), which must be merged into its base model first"
        ));
    }
    if let Some(name) = find(&is("model_index.json")) {
        return Some(format!("it holds {name}: a pipeline of diffusers, which is no language model"));
    }
    if let Some(name) = find(&is("snapshots")) {
        return Some(format!(
            "it is a repository in a hub's cache: give a folder inside {name}, or the hub id"
        ));
    }
    let pickled = |name: &str| {
        let ends = [".bin", ".pt", ".pth", ".ckpt"].iter().any(|end| name.ends_with(end));
        ends && !["training_args.bin", "optimizer.pt", "scheduler.pt"].contains(&name)
    };
    if let Some(name) = find(&pickled) {
        return Some(format!(
            "it holds {name}, weights that PyTorch has pickled, which are not read: save the model with transformers \
             (save_pretrained writes safetensors)"
        ));
    }
    if let Some(name) = find(&|name| name.starts_with("consolidated") || name == "params.json") {
        return Some(format!("it holds {name}, its maker's own format, which is not read: {ORIGINAL}"));
    }
    let other = |name: &str| {
        [".onnx", ".h5", ".msgpack", ".mlmodel", ".tflite", ".engine"].iter().any(|end| name.ends_with(end))
    };
    if let Some(name) = find(&other) {
        return Some(format!("it holds {name}, a format that is not read: {ORIGINAL}"));
    }
    let weights = find(&|name| name.ends_with(".safetensors"))?;
    Some(format!("it holds {weights}, but no index names it"))
}

const ORIGINAL: &str = "give the model in the format of Hugging Face transformers, with safetensors";

#[cfg(test)]
mod tests;
