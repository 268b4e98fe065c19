//! Headers of files, and directories with an index.

use std::fs;

use crate::{config::Directory, input::Input};

/// Runs one input: a file, or a directory of an index and files.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    // The length of the header is right in most inputs, since few others get past it.
    match kind % 3 {
        0 => tutti_models::fuzzing::safetensors_header(rest),
        1 => tutti_models::fuzzing::safetensors_header(&with_length(rest)),
        _ => directory(rest),
    }
}

/// A file with this header, of which the last byte says how many bytes of data follow.
fn with_length(header: &[u8]) -> Vec<u8> {
    let (bytes, header) = header.split_last().map_or((0, header), |(last, rest)| (*last, rest));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.resize(file.len() + usize::from(bytes), 7);
    file
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
