//! Entry points of the fuzzers of headers and indices of safetensors files.

use std::{
    path::Path,
    sync::{LazyLock, Mutex, PoisonError},
};

use safetensors::SafeTensors;
use tutti_kernels::{
    WeightType,
    collective::GroupRank,
    cpu::{CpuDevice, Isa},
};
use tutti_runtime::{
    checkpoint::{Checkpoint, CheckpointFile},
    gguf,
};

use super::{
    GgufFile, Role, SafetensorsDir, TensorSpec,
    header::Header,
    quantised::{Checked, HeldRows, MARKS},
    safetensors::{Stored, indexed_paths},
};
use crate::config::ConfigFile;

static DEVICE: LazyLock<Mutex<CpuDevice>> =
    LazyLock::new(|| Mutex::new(CpuDevice::new(1, Isa::detect()).expect("a thread")));

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

/// Opens a directory with a `config.json` and a safetensors file, and dequantises its matrices of `shape`.
pub fn quantised(dir: &Path, shape: &[usize; 2]) {
    let (Ok(config), Ok(files)) = (ConfigFile::read(dir), SafetensorsDir::open(dir)) else { return };
    let Ok(quantisation) = config.quantisation() else { return };
    let names: Vec<String> = files.unused().map(str::to_owned).collect();
    let files = files.with_quantisation(quantisation);
    let [rows, columns] = *shape;
    let module = |name: &String| {
        let marks = MARKS.iter().copied().chain(["weight"]);
        marks.filter_map(|mark| name.strip_suffix(mark)?.strip_suffix('.').map(str::to_owned)).next()
    };
    for module in names.iter().filter_map(module) {
        let spec = TensorSpec::matrix(format!("{module}.weight"), Role::Projection, rows, columns);
        let Ok(Stored::Quantised(Checked { layout, .. }, dtype)) = files.stored(&spec) else { continue };
        for (rows, columns) in [(0..rows, 0..columns), (rows / 2..rows, columns / 3..columns)] {
            let window = layout.read(rows.clone(), columns.clone());
            let mut out = vec![0; rows.len() * columns.len() * dtype.bytes()];
            window.dequantise(dtype, &mut out);
        }
        if let (Some(form), true) = (layout.form(), rows > 0) {
            let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
            for window in spec.shard_range(GroupRank::ALONE).all_windows() {
                let held = HeldRows::read(&mut *device, &*layout, &window, form).expect("host memory");
                held.view().check().expect("rows as their form says");
            }
        }
        for window in spec.shard_range(GroupRank::ALONE).all_windows() {
            let extent = files.extent(&spec, &window).expect("a tensor that was checked");
            assert!(extent.bytes.end <= extent.map.len());
        }
    }
}

/// Reads a GGUF file: its metadata as text files, and its tensors.
pub fn gguf_file(path: &Path) {
    if let Ok(checkpoint) = Checkpoint::open(path, "") {
        for file in CheckpointFile::ALL {
            if let Ok(Some(bytes)) = checkpoint.read(file) {
                serde_json::from_slice::<serde_json::Value>(&bytes).expect("JSON");
            }
        }
    }
    let (Ok(header), Ok(file)) = (gguf::Header::open(path), GgufFile::open(path)) else { return };
    let mut device = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    for (name, info) in &header.tensors {
        let [rows, columns] = info.shape[..] else { continue };
        let Some(layer) = name.strip_prefix("blk.").and_then(|name| name.strip_suffix(".ffn_up.weight"))
        else {
            continue;
        };
        let name = format!("model.layers.{layer}.mlp.up_proj.weight");
        let spec = TensorSpec::matrix(name, Role::Projection, rows, columns);
        for window in spec.shard_range(GroupRank::ALONE).all_windows() {
            let bytes =
                file.read(&mut *device, &spec, &window, WeightType::F32).expect("a tensor of this shape");
            assert_eq!(bytes.len(), 4 * rows * columns);
            let extent = file.extent(&spec, &window).expect("a tensor of this shape");
            assert!(extent.bytes.end <= extent.map.len());
        }
    }
}
