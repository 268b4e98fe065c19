//! Entry points of the fuzzers of headers and indices of safetensors files.

use std::path::Path;

use safetensors::SafeTensors;
use tutti_kernels::collective::GroupRank;

use super::{Role, SafetensorsDir, TensorSpec, header::Header, safetensors::indexed_paths};

/// Parses the header of a file. Checks that `Header` accepts every header that the safetensors crate accepts, with
/// the same contents. Also checks that every tensor lies within the file.
pub fn safetensors_header(file: &[u8]) {
    let parsed = Header::parse(file);
    match (&parsed, SafeTensors::deserialize(file)) {
        (Ok(header), Ok(reference)) => {
            assert_eq!(header.tensors.len(), reference.len(), "another number of tensors");
            for (name, view) in reference.iter() {
                let info = &header.tensors[name];
                assert_eq!((info.dtype, &*info.shape), (view.dtype(), view.shape()));
                let (start, end) = info.data_offsets;
                assert_eq!(&file[header.data_start + start..header.data_start + end], view.data());
            }
        }
        (Err(error), Ok(_)) => {
            assert!(error.problem.contains("occurs twice"), "refused, but sound: {error:?}");
        }
        (Ok(header), Err(_)) => {
            for (name, info) in &header.tensors {
                let (start, end) = info.data_offsets;
                assert!(start <= end && end <= file.len() - header.data_start, "{name:?} is not in the file");
            }
        }
        (Err(error), Err(_)) => {
            assert!(error.problem.len() < 4096, "an error of {} bytes", error.problem.len())
        }
    }
}

/// Opens a directory that has an index or a single file, and reads windows of its tensors.
pub fn safetensors_index(dir: &Path, index: &Path, shape: &[usize; 2]) {
    if let Ok(paths) = indexed_paths(dir, index) {
        for path in paths {
            assert_eq!(path.parent(), Some(dir), "a file outside of the directory");
        }
    }
    let Ok(files) = SafetensorsDir::open(dir) else { return };
    let names: Vec<String> = files.unused().map(str::to_owned).collect();
    for name in names {
        let [rows, columns] = *shape;
        for spec in [
            TensorSpec::matrix(&*name, Role::Projection, rows, columns),
            TensorSpec::vector(&*name, Role::Norm, rows),
            TensorSpec::matrix(&*name, Role::Projection, columns, rows).transposed(),
        ] {
            let Ok(dtype) = files.check(&spec) else { continue };
            for window in spec.shard_range(GroupRank::ALONE).all_windows() {
                let view = files.window(&spec, &window).expect("a tensor that was checked");
                assert_eq!(view.bytes.len(), window.elements() * dtype.bytes());
                let extent = files.extent(&spec, &window).expect("a tensor that was checked");
                assert_eq!(extent.bytes.len(), view.bytes.len());
                assert!(extent.bytes.end <= extent.map.len());
            }
            files
                .release(&spec, &spec.shard_range(GroupRank::ALONE).all_windows().next().expect("one"))
                .expect("mapped");
        }
    }
}
