//! The topology file: groups of workers, and what each runs.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;
use tutti_runtime::{Error, config};
use tutti_settings::{DeviceChoice, MAX_WORKERS};

use crate::cluster::{GroupSpec, Topology};

/// Groups as the cluster knows them, each with what its workers run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Which rank belongs where.
    pub topology: Topology,
    /// Of each group of the topology, in its order.
    pub devices: Vec<DeviceChoice>,
}

/// A topology file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TopologyFile {
    /// In TOML, a `[[group]]` each.
    group: Vec<GroupTable>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupTable {
    name: String,
    /// The nodes that its workers hold; all without it.
    nodes: Option<Vec<String>>,
    /// The walks that they run; all over their nodes without it.
    walks: Option<Vec<String>>,
    /// Workers that divide one model among them; 1 without it.
    tp: Option<u32>,
    /// How many times that; 1 without it.
    replicas: Option<u32>,
    /// Workers in all: tp times replicas. Any two of the three say the third.
    ranks: Option<u32>,
    /// What they run on; the conductor's own `device` without it.
    device: Option<DeviceChoice>,
    /// False where they join by hand.
    #[serde(default = "yes")]
    spawn: bool,
}

fn yes() -> bool {
    true
}

impl Layout {
    /// The short form: workers that run whole requests, `tp` of them a replica.
    pub fn all_in_one(workers: u32, tp: u32, device: DeviceChoice) -> Self {
        Self { topology: Topology::all_in_one(workers, tp), devices: vec![device] }
    }

    /// Reads a topology file. Groups that name no device run on `device`. What walks and nodes a model has shows only when
    /// it is loaded.
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
        // The ranks of those that join by hand come after all others, as the gate tells them apart by that.
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
        // Tokens of a simulated device mean nothing to a real one.
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
mod tests {
    use std::io::Write;

    use super::*;

    fn read(ending: &str, text: &str) -> Result<Layout, Error> {
        let mut file = tempfile::Builder::new().suffix(ending).tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        Layout::read(file.path(), DeviceChoice::Auto)
    }

    #[track_caller]
    fn refused(text: &str, told: &str) {
        let error = read(".toml", text).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }

    #[test]
    fn toml_and_yaml_say_the_same() {
        let toml =
            "[[group]]\nname = 'p'\nwalks = ['prefill_text']\ntp = 2\n[[group]]\nname = 'd'\nranks = 3\n";
        let yaml = "group:\n- {name: p, walks: [prefill_text], tp: 2}\n- {name: d, ranks: 3}\n";
        let layout = read(".toml", toml).unwrap();
        assert_eq!(layout, read(".yaml", yaml).unwrap());
        let groups = layout.topology.groups();
        assert_eq!((groups[0].tp, groups[0].replicas, groups[1].tp, groups[1].replicas), (2, 1, 1, 3));
        assert_eq!(groups[0].walks, Some(vec!["prefill_text".to_owned()]));
        assert_eq!(layout.topology.spawned_workers(), 5);
    }

    #[test]
    fn workers_that_join_by_hand_have_the_last_ranks() {
        let text =
            "[[group]]\nname = 'far'\nspawn = false\n[[group]]\nname = 'near'\nranks = 2\ndevice = 'cpu'\n";
        let layout = read(".toml", text).unwrap();
        let names: Vec<&str> = layout.topology.groups().iter().map(|group| group.name.as_str()).collect();
        assert_eq!((names, layout.topology.spawned_workers()), (vec!["near", "far"], 2));
        assert_eq!(layout.devices, [DeviceChoice::Cpu, DeviceChoice::Auto]);
    }

    #[test]
    fn what_contradicts_itself_is_refused_by_name() {
        let group = |lines: &str| format!("[[group]]\nname = 'g'\n{lines}\n");
        refused(&group("wlaks = ['a']"), "wlaks");
        refused(&group("tp = 'two'"), "tp");
        refused(&group("tp = 0"), "group \"g\": tp: is 0");
        refused(&group("replicas = 257"), "replicas: is 257, the limit is 256");
        refused(&group("ranks = 3\ntp = 2"), "ranks: is 3, which tp 2 does not divide");
        refused(&group("ranks = 3\nreplicas = 2"), "ranks: is 3, which 2 replicas");
        refused(&group("ranks = 3\nreplicas = 2\ntp = 2"), "tp 2 times 2 replicas is 4");
        refused(&group("walks = []"), "walks: is empty");
        refused(&(group("device = 'sim'") + "[[group]]\nname = 'h'"), "run on sim, and others do not");
        refused(&(group("") + &group("")), "group \"g\": name: is that of another");
        refused(&(group("ranks = 200") + "[[group]]\nname = 'h'\nranks = 57"), "257 workers in all");
        refused("group = []", "group: is empty");
        refused("[[group]]\ntp = 1", "name");
        refused("workers = 2", "workers");
    }
}
