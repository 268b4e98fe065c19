//! safetensors files: their headers, and directories with an index.

use std::fs;

use crate::{config::Directory, input::Input};

/// Runs one input: a file, or a directory with an index and two files.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    // Two of three kinds state the right length of the header, because few other files pass the check of the length.
    match kind % 3 {
        0 => tutti_models::fuzzing::safetensors_header(rest),
        1 => tutti_models::fuzzing::safetensors_header(&with_length(rest)),
        _ => directory(rest),
    }
}

/// Returns a file with a header and data. The last byte of `header` is the number of data bytes, and not a part of the
/// header.
fn with_length(header: &[u8]) -> Vec<u8> {
    let (bytes, header) = header.split_last().map_or((0, header), |(last, rest)| (*last, rest));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.resize(file.len() + usize::from(bytes), 7);
    file
}

/// Runs one input of quantised weights: the shape of the matrices, a `config.json`, and a file's header and data.
pub fn quantised(data: &[u8]) {
    let directory = Directory::shared();
    let mut input = Input(data);
    let shape = [usize::from(input.byte()), usize::from(input.byte())];
    directory.write("config.json", input.piece());
    let header = input.piece();
    let length = (header.len() as u64).to_le_bytes();
    directory.write("model.safetensors", &[&length, header, input.0].concat());
    tutti_models::fuzzing::quantised(directory.dir(), &shape);
    directory.clear();
}

/// Runs one input that is a GGUF file.
pub fn gguf(data: &[u8]) {
    let directory = Directory::shared();
    tutti_models::fuzzing::gguf_file(&directory.write("model.gguf", data));
    directory.clear();
}

fn directory(data: &[u8]) {
    let directory = Directory::shared();
    let mut input = Input(data);
    let shape = [usize::from(input.byte()), usize::from(input.byte())];
    let (index, first, second) = (input.piece(), with_length(input.piece()), with_length(input.piece()));
    let path = directory.path("model.safetensors.index.json");
    fs::write(&path, index).expect("a file");
    for (name, file) in [("a.safetensors", first), ("b.safetensors", second)] {
        fs::write(directory.path(name), file).expect("a file");
    }
    tutti_models::fuzzing::safetensors_index(directory.dir(), &path, &shape);
    directory.clear();
}
