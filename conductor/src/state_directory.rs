//! The directory by which workers outlive a conductor that dies, and join the next one.
//!
//! It has mode 0700 and holds the sockets of the cluster, a lock and a record. The conductor keeps the file `lock`
//! locked for its whole life, so that one conductor at a time has the directory. `record.json` (mode 0600) has the
//! secret of spawned workers, their processes, and all that determines what they hold. A successor takes the workers
//! over if it would start equal ones. Otherwise it ends them, and starts anew: a restart with another model or flag
//! shall serve that model, and not fail until the old workers have given up.

mod record;
mod survivor;

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use parking_lot::Mutex;
use rustix::fs::OFlags;
use serde_json::Value;
use tutti_proto::Rank;
use tutti_runtime::{Error, checkpoint::gguf_files};

pub use self::survivor::Survivor;
pub(crate) use self::survivor::Watched;
use self::{
    record::{Record, difference},
    survivor::ProcessId,
};
use crate::{cluster::Topology, random_token};

/// The setting that errors name.
const FIELD: &str = "state_directory";
const LOCK: &str = "lock";
const RECORD: &str = "record.json";

/// A state directory, which this process holds.
#[derive(Debug)]
pub struct StateDirectory {
    path: PathBuf,
    /// Locked. The kernel releases the lock when the process has ended, however it ends.
    _lock: File,
    record: Mutex<Record>,
}

/// The workers and secrets that a conductor takes over from the one before it, or begins with.
#[derive(Debug)]
pub struct Inheritance {
    /// The secret of spawned workers.
    pub secret: String,
    /// Settings of the workers of each group, in the order of the topology.
    pub worker_settings: Vec<Value>,
    /// Number of conductors before this one that these workers have had.
    pub life: u64,
    /// The workers that have outlived the conductor before.
    pub survivors: BTreeMap<Rank, Survivor>,
}

impl Inheritance {
    /// Ends the workers of each replica that has lost a rank. Its other ranks cannot meet again, so the replica is
    /// started anew as a whole.
    pub async fn end_broken_replicas(&mut self, topology: &Topology, state: &StateDirectory) {
        let has = |rank: Rank| self.survivors.contains_key(&rank);
        let is_broken = |rank: Rank| topology.replica_of(rank).is_none_or(|it| !it.ranks().all(has));
        let ranks: Vec<Rank> = self.survivors.keys().copied().filter(|rank| is_broken(*rank)).collect();
        let broken: Vec<_> = ranks.iter().filter_map(|rank| self.survivors.remove_entry(rank)).collect();
        // All are killed before the first is awaited, so that they end at the same time.
        broken.iter().for_each(|(_, survivor)| survivor.kill());
        for (rank, survivor) in broken {
            tracing::warn!(worker = rank.0, "ending a worker whose group has lost a rank");
            survivor.end().await;
            state.ended(rank);
        }
    }
}

impl StateDirectory {
    /// Takes the directory for this process. Makes it if it is missing.
    ///
    /// # Errors
    /// Other users may enter the directory, or another conductor has it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let refused = |what: String| Error::invalid(FIELD, format!("{}: {what}", path.display()));
        let path =
            std::path::absolute(path).map_err(|error| refused(format!("has no absolute path: {error}")))?;
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(refused(format!("cannot be made: {error}")));
            }
            _ => {}
        }
        let found = path.symlink_metadata().map_err(|error| refused(format!("cannot be read: {error}")))?;
        let mode = found.mode() & 0o777;
        if !found.is_dir() {
            return Err(refused("is no directory".into()));
        }
        if found.uid() != rustix::process::geteuid().as_raw() || mode & 0o077 != 0 {
            let owner = found.uid();
            return Err(refused(format!(
                "has mode {mode:03o} and owner {owner}, but must be this user's alone (0700)"
            )));
        }
        let lock = options().create(true).truncate(false).open(path.join(LOCK));
        let mut lock = lock.map_err(|error| refused(format!("its lock cannot be opened: {error}")))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = io::read_to_string(&lock).unwrap_or_default();
                return Err(refused(format!("belongs to the running conductor with pid {}", holder.trim())));
            }
            Err(TryLockError::Error(error)) => return Err(refused(format!("cannot be locked: {error}"))),
        }
        // The number is for the error of another conductor alone.
        let named = lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id()));
        named.map_err(|error| refused(format!("cannot be written to: {error}")))?;
        Ok(Self { path, _lock: lock, record: Mutex::default() })
    }

    /// The directory's absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes over the workers of the conductor before if they hold what this one's workers would: `holdings` names all
    /// that determines it. Ends them otherwise. `new_settings` makes the settings of workers that start anew, and is
    /// called when the former workers have given their memory back.
    pub async fn succeed(
        &self,
        holdings: Value,
        new_settings: impl FnOnce() -> Result<Vec<Value>, Error>,
    ) -> Result<Inheritance, Error> {
        let former = self.read_record().unwrap_or_default();
        let mut survivors = former.survivors();
        let changed = difference(&former.holdings, &holdings);
        let record = if survivors.is_empty() || changed.is_some() {
            if !survivors.is_empty() {
                let changed = changed.unwrap_or_default();
                tracing::warn!(
                    changed,
                    workers = survivors.len(),
                    "ending the workers of the conductor before"
                );
            }
            // All are killed before the first is awaited, so that they end at the same time.
            survivors.values().for_each(Survivor::kill);
            for (_, survivor) in std::mem::take(&mut survivors) {
                survivor.end().await;
            }
            let worker_settings = new_settings()?;
            Record { holdings, worker_settings, secret: random_token()?, ..Record::of_this_boot() }
        } else {
            let workers = survivors.iter().map(|(rank, survivor)| (rank.0, survivor.id())).collect();
            Record { life: former.life + 1, workers, ..former }
        };
        let (secret, worker_settings) = (record.secret.clone(), record.worker_settings.clone());
        let inheritance = Inheritance { secret, worker_settings, life: record.life, survivors };
        *self.record.lock() = record;
        self.write_record()?;
        Ok(inheritance)
    }

    /// Records the process of a rank's worker, before the worker learns the secret by which it could join.
    ///
    /// # Errors
    /// The record cannot be written, or the process has ended.
    pub fn started(&self, rank: Rank, pid: u32) -> Result<(), Error> {
        let id = ProcessId::of(pid).ok_or_else(|| Error::internal("the process has ended"))?;
        self.record.lock().workers.insert(rank.0, id);
        self.write_record()
    }

    /// Forgets the process of a rank's worker, which has ended. The next record that is written lacks it.
    pub fn ended(&self, rank: Rank) {
        self.record.lock().workers.remove(&rank.0);
    }

    /// Kills all workers that are left. A conductor that ends by itself leaves none.
    pub fn kill_all(&self) {
        self.record.lock().survivors().values().for_each(Survivor::kill);
    }

    fn read_record(&self) -> Option<Record> {
        let mut file = File::options();
        let file =
            file.read(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(self.path.join(RECORD));
        let text = match file.and_then(io::read_to_string) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!(%error, "cannot read the record of the conductor before; its workers end by themselves");
                return None;
            }
        };
        let record = Record::parse(&text);
        record
            .inspect_err(|error| {
                tracing::warn!(%error, "the record of the conductor before is no record; its workers end by themselves");
            })
            .ok()
    }

    /// Writes the record. A reader finds a whole one.
    fn write_record(&self) -> Result<(), Error> {
        let record = self.record.lock();
        let (new, path) = (self.path.join("record.json.new"), self.path.join(RECORD));
        let write = || -> io::Result<()> {
            let text = serde_json::to_vec(&*record)?;
            options().create(true).truncate(true).open(&new)?.write_all(&text)?;
            fs::rename(&new, &path)
        };
        write().map_err(|error| Error::internal(format!("{FIELD}: cannot write {}: {error}", path.display())))
    }
}

/// Options by which files are opened for reading and writing. New ones get mode 0600.
fn options() -> fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

/// The names, sizes and times of change of a checkpoint's files. Equal values stand for equal contents.
pub fn files_of(directory: &Path) -> Value {
    let Ok(entries) = fs::read_dir(directory) else {
        return gguf_files(directory).iter().map(|file| executable(file)).collect();
    };
    let mut files = serde_json::Map::new();
    for entry in entries.flatten() {
        // Files of the hub's cache are links to their contents.
        if let Ok(found) = entry.path().metadata() {
            files.insert(entry.file_name().to_string_lossy().into_owned(), described(&found));
        }
    }
    Value::Object(files)
}

/// The size and time of change of an executable. Equal values stand for the same build.
pub fn executable(path: &Path) -> Value {
    path.metadata().map_or(Value::Null, |found| described(&found))
}

fn described(found: &fs::Metadata) -> Value {
    format!("{} bytes of {}.{:09}", found.len(), found.mtime(), found.mtime_nsec()).into()
}

#[cfg(test)]
mod tests;
