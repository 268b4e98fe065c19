//! Entry points of the fuzzers, compiled by `tests/fuzz` alone. A check that fails is a finding.

use std::path::Path;

use tutti_proto::{cluster::v1 as pb, declaration::ModelDeclaration};
use tutti_settings::{DeviceChoice, MAX_WORKERS};

pub use crate::cluster::fuzzing::{Event, play};
use crate::{
    config::Layout,
    request::{media, validate},
};

/// Fields of which the conductor alone knows the limits.
const OWN_FIELDS: [&str; 1] = ["min_tokens"];

/// Checks that the conductor takes a request that a router has let through.
pub fn takes(spec: &pb::RequestSpec, model: &pb::ModelDescription) {
    let declaration = model.declaration.clone().unwrap_or_default();
    let declaration = ModelDeclaration::try_from(declaration).expect("a sound declaration");
    let checked = validate::check_spec(spec, model).and_then(|()| media::check(spec, &declaration));
    if let Err(error) = checked {
        let known =
            error.field().is_some_and(|field| OWN_FIELDS.contains(&field) || field.starts_with("media"));
        assert!(known, "the router lets through what the conductor refuses: {error}");
    }
}

/// Reads a topology file. Whatever is accepted has few workers, and the same file as YAML and as TOML means the same.
pub fn topology(path: &Path) {
    let Ok(layout) = Layout::read(path, DeviceChoice::Cpu) else { return };
    let groups = layout.topology.groups();
    assert_eq!(groups.len(), layout.devices.len());
    let ranks: u32 = groups.iter().map(|group| group.tp * group.replicas).sum();
    assert!((1..=MAX_WORKERS).contains(&ranks), "{ranks} ranks");
    assert!(layout.topology.spawned_workers() <= ranks);
}
