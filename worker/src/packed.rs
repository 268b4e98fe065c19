//! Opens the packed weights that match a worker's settings.

use std::{fmt::Write, fs, io, path::Path, time::UNIX_EPOCH};

use tutti_kernels::{
    collective::GroupRank,
    cpu::{Isa, PackedOutcome, PackedWeights},
};
use tutti_runtime::{Error, checkpoint::gguf_files, gguf};
use tutti_settings::{WeightSettings, WorkerSettings};

/// Opens the packed weights in `dir` for these settings, this instruction path and this rank of a group.
pub fn open(
    dir: &Path,
    settings: &WorkerSettings,
    isa: Isa,
    group_rank: GroupRank,
) -> Result<PackedWeights, Error> {
    let unreadable =
        |error: io::Error| Error::internal(format!("cannot list {}: {error}", settings.model_dir.display()));
    Ok(PackedWeights::open(dir, &key(settings, isa, group_rank).map_err(unreadable)?))
}

/// Returns a key of everything that determines the packed bytes. The key lists the model's files with their sizes and
/// modification times.
fn key(settings: &WorkerSettings, isa: Isa, group_rank: GroupRank) -> io::Result<String> {
    let WorkerSettings {
        model_dir, weights: WeightSettings { quantize, no_screened_head, .. }, nodes, ..
    } = settings;
    let mut files = Vec::new();
    let paths = match gguf::is_file(model_dir) {
        true => gguf_files(model_dir),
        false => fs::read_dir(model_dir)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?,
    };
    for path in paths {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if name == "config.json" || name.ends_with(".safetensors") || name.ends_with(".gguf") {
            // `fs::metadata` follows links, so size and time belong to a link's target.
            let found = fs::metadata(&path)?;
            let written = found.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
            files.push((name, found.len(), written.as_nanos()));
        }
    }
    files.sort();
    let GroupRank { rank, world_size } = group_rank;
    let experts = if settings.tensor_parallel.ep { " whole experts" } else { "" };
    let head = if *no_screened_head { " without a screen" } else { "" };
    let mut key = format!("{isa} {quantize:?}{head} rank {rank} of {world_size}{experts} nodes {nodes:?}\n");
    for (name, bytes, written) in files {
        // The header page of the packed file holds only the beginning of a long key, for example a key of a thousand
        // files. The whole key still counts, because the file's name contains its hash.
        let _ = writeln!(key, "{name} {bytes} {written}");
    }
    Ok(key)
}

/// Gives a newly written packed file its final name, and logs the outcome. Must be called after all weights are loaded.
/// A failure is harmless: loading does not depend on the packed file.
pub fn finish(packed: &PackedWeights) {
    match packed.finish() {
        PackedOutcome::Mapped => tracing::info!("packed weights mapped from a file"),
        PackedOutcome::Written => tracing::info!("packed weights written for the next start"),
        PackedOutcome::Unused(why) => tracing::warn!(why, "packed weights are not kept"),
    }
}
