//! The conductors of this user that run on this machine. Each leaves a note with its address in a directory that only
//! this user can enter, so that commands find it. The directory goes with its conductor. The note of a killed one does
//! not count, because nobody holds the lock of its directory.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tutti_runtime::Error;

use crate::private_directory::{self, PrivateDirectory};

/// Name of the file with the note.
const NOTE: &str = "conductor.json";

/// A note about a running conductor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The URL of the listener for routers and operators.
    pub cluster: String,
    /// The file with the secret that calls show.
    pub cluster_token_file: Option<PathBuf>,
    /// Names of the served model.
    pub model: String,
    /// The conductor's process.
    pub pid: u32,
}

impl Note {
    /// Leaves the note for as long as the returned value lives.
    pub fn leave(&self) -> Result<LeftNote, Error> {
        self.leave_in(&env::temp_dir())
            .map_err(|error| Error::internal(format!("cannot leave a note for commands: {error}")))
    }

    fn leave_in(&self, parent: &Path) -> std::io::Result<LeftNote> {
        let directory = PrivateDirectory::new_in(parent)?;
        // A reader finds the whole note or none.
        let unfinished = directory.path().join("conductor.json.new");
        fs::write(&unfinished, serde_json::to_vec(self)?)?;
        fs::rename(&unfinished, directory.path().join(NOTE))?;
        Ok(LeftNote { _directory: directory })
    }

    /// The notes of all conductors of this user that run with this process's temporary directory, in order of their
    /// addresses.
    pub fn all() -> Vec<Self> {
        let mut notes = Self::all_in(&env::temp_dir());
        notes.sort_by(|a, b| a.cluster.cmp(&b.cluster));
        notes
    }

    fn all_in(parent: &Path) -> Vec<Self> {
        let paths = private_directory::running_in(parent).into_iter();
        paths
            .filter_map(|path| serde_json::from_str(&private_directory::read(&path.join(NOTE))?).ok())
            .collect()
    }

    /// The only one of these conductors.
    ///
    /// # Errors
    /// There is none, or there are several, which the error lists.
    pub fn only(mut notes: Vec<Self>) -> Result<Self, Error> {
        match notes.len() {
            1 => Ok(notes.remove(0)),
            0 => {
                let message = "is missing, and no conductor of this user runs on this machine: give the URL of the \
                               conductor's --cluster-grpc";
                Err(Error::invalid("conductor", message))
            }
            several => {
                let listed: Vec<String> = notes
                    .iter()
                    .map(|note| format!("{} (process {}, model {})", note.cluster, note.pid, note.model))
                    .collect();
                let message = format!(
                    "is missing, and {several} conductors run on this machine, so give one of {}",
                    listed.join(", ")
                );
                Err(Error::invalid("conductor", message))
            }
        }
    }
}

/// A note that is removed when the value is dropped.
#[derive(Debug)]
pub struct LeftNote {
    _directory: PrivateDirectory,
}

#[cfg(test)]
mod tests;
