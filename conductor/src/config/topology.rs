//! The topology file. It lists groups of workers. Each group has a device, and the nodes and walks (passes over nodes)
//! of the model that its workers run.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;
use tutti_runtime::{Error, config};
use tutti_settings::{DeviceChoice, MAX_WORKERS};

use crate::cluster::{GroupSpec, Topology};

/// The groups of a cluster, and the device of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The groups and their ranks.
    pub topology: Topology,
    /// The device of each group, in the order of the topology.
    pub devices: Vec<DeviceChoice>,
}

/// A topology file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopologyFile {
    /// One table per group: `[[group]]` in TOML.
    group: Vec<GroupTable>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupTable {
    name: String,
    /// Names of the model's nodes whose weights the group's workers load. All nodes if absent.
    nodes: Option<Vec<String>>,
    /// Names of the walks that the group's workers run. If absent, the workers run all walks that need only `nodes`.
    walks: Option<Vec<String>>,
    /// Number of workers that share one replica of the model. Defaults to 1.
    tp: Option<u32>,
    /// Number of replicas. Defaults to 1.
    replicas: Option<u32>,
    /// Total number of workers of the group: `tp` times `replicas`. Any two of these three keys determine the third.
    ranks: Option<u32>,
    /// Device of the group's workers; the conductor's `device` if absent.
    device: Option<DeviceChoice>,
    /// False if the group's workers join by hand.
    #[serde(default = "yes")]
    spawn: bool,
}

fn yes() -> bool {
    true
}

impl Layout {
    /// Creates the layout of `--workers` and `--tp`: one group of `workers` workers that run whole requests, with `tp`
    /// workers per replica.
    pub fn all_in_one(workers: u32, tp: u32, device: DeviceChoice) -> Self {
        Self { topology: Topology::all_in_one(workers, tp), devices: vec![device] }
    }

    /// Reads a topology file. Groups that name no device run on `device`. Names of walks and nodes are checked later,
    /// when the model is loaded.
    pub fn read(path: &Path, device: DeviceChoice) -> Result<Self, Error> {
        let file: TopologyFile = config::read("topology", path)?;
        let explain = |why: String| Error::invalid("topology", format!("{}: {why}", path.display()));
        Self::of(file, device).map_err(explain)
    }

    fn of(file: TopologyFile, device: DeviceChoice) -> Result<Self, String> {
        if file.group.is_empty() {
            return Err("group: is empty, but somebody has to do the work".into());
        }
        let mut names = BTreeSet::new();
        if let Some(twice) = file.group.iter().find(|group| !names.insert(&group.name)) {
            return Err(format!("group {:?}: name: is that of another group too", twice.name));
        }
        // Workers that join by hand get the highest ranks, because the conductor distinguishes them from spawned
        // workers by rank.
        let (spawned, by_hand): (Vec<_>, Vec<_>) = file.group.into_iter().partition(|group| group.spawn);
        let (mut groups, mut devices) = (Vec::new(), Vec::new());
        for table in spawned.into_iter().chain(by_hand) {
            devices.push(table.device.unwrap_or(device));
            let name = table.name.clone();
            groups.push(table.check().map_err(|why| format!("group {name:?}: {why}"))?);
        }
        let workers: u64 = groups.iter().map(|group| u64::from(group.ranks())).sum();
        if workers > u64::from(MAX_WORKERS) {
            return Err(format!("{workers} workers in all, the limit is {MAX_WORKERS}"));
        }
        // Simulated and real devices are not mixed, since a simulated device generates tokens that mean nothing to a
        // real device.
        let simulated = devices.iter().filter(|device| **device == DeviceChoice::Sim).count();
        if simulated > 0 && simulated < devices.len() {
            return Err("device: some groups run on sim, and others do not".into());
        }
        Ok(Self { topology: Topology::new(groups), devices })
    }
}

impl GroupTable {
    fn check(self) -> Result<GroupSpec, String> {
        if self.name.is_empty() {
            return Err("name: is empty".into());
        }
        for (key, names) in [("nodes", &self.nodes), ("walks", &self.walks)] {
            if names.as_ref().is_some_and(Vec::is_empty) {
                return Err(format!("{key}: is empty; leave it out for all"));
            }
        }
        for (key, value) in [("tp", self.tp), ("replicas", self.replicas), ("ranks", self.ranks)] {
            match value {
                Some(0) => return Err(format!("{key}: is 0, but must be at least 1")),
                Some(n) if n > MAX_WORKERS => {
                    return Err(format!("{key}: is {n}, the limit is {MAX_WORKERS}"));
                }
                _ => {}
            }
        }
        let (tp, replicas) = match (self.tp, self.replicas, self.ranks) {
            (tp, None, Some(ranks)) => {
                let tp = tp.unwrap_or(1);
                if !ranks.is_multiple_of(tp) {
                    return Err(format!("ranks: is {ranks}, which tp {tp} does not divide"));
                }
                (tp, ranks / tp)
            }
            (None, Some(replicas), Some(ranks)) => {
                if !ranks.is_multiple_of(replicas) {
                    return Err(format!("ranks: is {ranks}, which {replicas} replicas do not divide"));
                }
                (ranks / replicas, replicas)
            }
            (tp, replicas, ranks) => {
                let (tp, replicas) = (tp.unwrap_or(1), replicas.unwrap_or(1));
                if let Some(ranks) = ranks.filter(|ranks| *ranks != tp * replicas) {
                    let product = tp * replicas;
                    return Err(format!(
                        "ranks: is {ranks}, but tp {tp} times {replicas} replicas is {product}"
                    ));
                }
                (tp, replicas)
            }
        };
        let Self { name, nodes, walks, spawn, .. } = self;
        Ok(GroupSpec { name, nodes, walks, tp, replicas, spawned: spawn })
    }
}

#[cfg(test)]
mod tests;
