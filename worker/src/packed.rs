//! Which packed weights belong to a worker's settings.

use std::{fmt::Write, fs, io, path::Path, time::UNIX_EPOCH};

use tutti_kernels::{
    collective::GroupRank,
    cpu::{Isa, PackedOutcome, PackedWeights},
};
use tutti_runtime::Error;

use crate::config::WorkerSettings;

/// Opens the packed weights in `dir` that belong to these settings, this instruction path and this rank of a group.
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

/// All that decides on the packed bytes but the model itself: that is named by its files, their sizes, and when they were
/// last written to.
fn key(settings: &WorkerSettings, isa: Isa, group_rank: GroupRank) -> io::Result<String> {
    let WorkerSettings { model_dir, quantize, nodes, .. } = settings;
    let mut files = Vec::new();
    for entry in fs::read_dir(model_dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == "config.json" || name.ends_with(".safetensors") {
            // Of what a link leads to.
            let found = fs::metadata(entry.path())?;
            let written = found.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
            files.push((name, found.len(), written.as_nanos()));
        }
    }
    files.sort();
    let mut key =
        format!("{isa} {quantize:?} rank {} of {} nodes {nodes:?}\n", group_rank.rank, group_rank.world_size);
    for (name, bytes, written) in files {
        // A checkpoint of a thousand files has a longer key than its page: the file's name holds all of it.
        let _ = writeln!(key, "{name} {bytes} {written}");
    }
    Ok(key)
}

/// Gives what was written its name, once all weights are there, and logs what became of it. Loading did not depend on it.
pub fn finish(packed: &PackedWeights) {
    match packed.finish() {
        PackedOutcome::Mapped => tracing::info!("packed weights mapped from a file"),
        PackedOutcome::Written => tracing::info!("packed weights written for the next start"),
        PackedOutcome::Unused(why) => tracing::warn!(why, "packed weights are not kept"),
    }
}
