//! The record that a conductor leaves to its successor.

use std::{collections::BTreeMap, fs};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tutti_proto::Rank;

use super::survivor::{ProcessId, Survivor};

/// Identifies the running kernel, so that process ids of an earlier boot are not taken for those of this one.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The workers of a conductor, and what determines what they hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The boot in which the processes run.
    pub boot: String,
    /// Number of conductors before this one that the workers have had.
    pub life: u64,
    /// The secret by which the workers join.
    pub secret: String,
    /// All that determines what workers hold.
    pub holdings: Value,
    /// The settings of each group's workers.
    pub worker_settings: Vec<Value>,
    /// The process of each rank's worker.
    pub workers: BTreeMap<u32, ProcessId>,
}

/// The part of a record by which any version finds the processes.
#[derive(Default, Deserialize)]
struct Processes {
    boot: String,
    workers: BTreeMap<u32, ProcessId>,
}

impl Record {
    /// A record without workers.
    pub fn of_this_boot() -> Self {
        Self { boot: boot(), ..Self::default() }
    }

    /// Reads a record. One of another version has the workers alone, so that they are ended: nothing is known of what
    /// they hold.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text).or_else(|_| {
            let Processes { boot, workers } = serde_json::from_str(text)?;
            Ok(Self { boot, workers, ..Self::default() })
        })
    }

    /// The workers that run.
    pub fn survivors(&self) -> BTreeMap<Rank, Survivor> {
        if self.boot != boot() {
            return BTreeMap::new();
        }
        let found = |(rank, id): (&u32, &ProcessId)| Some((Rank(*rank), Survivor::find(*id)?));
        self.workers.iter().filter_map(found).collect()
    }
}

fn boot() -> String {
    fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned()
}

/// The first difference between two values in words; `None` if they are equal.
pub fn difference(before: &Value, now: &Value) -> Option<String> {
    differ("", before, now)
}

fn differ(path: &str, before: &Value, now: &Value) -> Option<String> {
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match (before, now) {
        _ if before == now => None,
        (Value::Object(a), Value::Object(b)) => {
            let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            let value =
                |map: &serde_json::Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or_default();
            keys.into_iter().find_map(|key| differ(&below(key), &value(a, key), &value(b, key)))
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(index, (a, b))| differ(&below(&index.to_string()), a, b))
        }
        _ => Some(format!("{path} was {before}, and is {now}")),
    }
}
