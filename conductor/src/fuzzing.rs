//! Entry points of the fuzzers (`tests/fuzzing`). A check that fails is a finding.

use std::path::Path;

use tutti_proto::{cluster::v1 as pb, declaration::ModelDeclaration};
use tutti_runtime::Error;
use tutti_settings::{DeviceChoice, MAX_WORKERS};

pub use crate::cluster::fuzzing::{Event, play};
use crate::{config::Layout, request::media};

/// Checks that the conductor accepts a request that a router has accepted, except for its media.
pub fn takes(spec: &pb::RequestSpec, model: &pb::ModelDescription) {
    let declaration = model.declaration.clone().unwrap_or_default();
    let declaration = ModelDeclaration::try_from(declaration).expect("a sound declaration");
    let checked = spec.clone().check(&[], &model.request_limits()).map_err(Error::from);
    if let Err(error) = checked.and_then(|spec| media::check(&spec, &declaration)) {
        let known = error.field().is_some_and(|field| field.starts_with("media"));
        assert!(known, "the router lets through what the conductor refuses: {error}");
    }
}

/// Reads a topology file and checks that an accepted topology has from 1 to [`MAX_WORKERS`] ranks, and one device per
/// group.
pub fn topology(path: &Path) {
    let Ok(layout) = Layout::read(path, DeviceChoice::Cpu) else { return };
    let groups = layout.topology.groups();
    assert_eq!(groups.len(), layout.devices.len());
    let ranks: u32 = groups.iter().map(|group| group.tp * group.replicas).sum();
    assert!((1..=MAX_WORKERS).contains(&ranks), "{ranks} ranks");
    assert!(layout.topology.spawned_workers() <= ranks);
}
