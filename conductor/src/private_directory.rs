//! Private directories of conductors: making one, removing those of killed conductors, and listing those in use.
//!
//! A killed conductor leaves its directories behind, and the next conductor removes them. The owner of each directory
//! holds a lock that the kernel releases when the process ends. Workers that outlive a conductor share the lock of the
//! directory in which they meet.

use std::{
    fs::{self, File, Permissions, TryLockError},
    io::{self, Read},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::OFlags,
    io::{FdFlags, fcntl_setfd},
};
use tempfile::TempDir;

const PREFIX: &str = "tutti-conductor-";
/// Name of the file, in each private directory, that the directory's owner keeps locked.
const OWNER: &str = "owner";
/// Maximum size of a file in a private directory that another process reads.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// A directory that only this user can enter, removed when the value is dropped.
#[derive(Debug)]
pub struct PrivateDirectory {
    directory: TempDir,
    /// Locked. The kernel releases the lock when all processes that share it have ended.
    owner: Arc<File>,
}

/// The lock of a private directory, without the directory.
#[derive(Clone, Debug)]
pub struct OwnerLock(Arc<File>);

impl PrivateDirectory {
    /// Creates a directory in `parent`, and removes the directories of killed conductors.
    pub fn new_in(parent: &Path) -> io::Result<Self> {
        remove_abandoned(parent);
        let directory = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)?;
        // The owner file is locked under a temporary name and then renamed. Otherwise another conductor's
        // `remove_abandoned` could find it unlocked and remove the directory.
        let unlocked = directory.path().join("owner.new");
        let owner = File::create(&unlocked)?;
        owner.lock()?;
        fs::rename(&unlocked, directory.path().join(OWNER))?;
        Ok(Self { directory, owner: Arc::new(owner) })
    }

    /// The directory's lock.
    pub fn lock(&self) -> OwnerLock {
        OwnerLock(Arc::clone(&self.owner))
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl OwnerLock {
    /// Lets the processes that `start` starts share the lock. So the directory of a killed conductor stays until the
    /// last of its workers has ended. A process that another thread starts meanwhile may share the lock, too.
    pub fn sharing<T>(&self, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        fcntl_setfd(&*self.0, FdFlags::empty())?;
        let started = start();
        fcntl_setfd(&*self.0, FdFlags::CLOEXEC)?;
        started
    }
}

/// Removes directories of killed conductors. Keeps a directory without an owner file. A directory that cannot be
/// removed is left behind, which does no harm.
///
/// Every user may write to `parent`, so an entry with our prefix may belong to another user. Such an entry is not
/// opened. This function never waits for a file.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let private = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(PREFIX);
    for path in entries.flatten().filter(private).map(|entry| entry.path()) {
        if !is_own_directory(&path) {
            continue;
        }
        let Some(owner) = open_regular(&path.join(OWNER)) else { continue };
        match owner.try_lock() {
            Ok(()) if fs::remove_dir_all(&path).is_ok() => {
                tracing::debug!(directory = %path.display(), "removed the directory of a killed conductor");
            }
            Ok(()) | Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

/// The private directories of this user in `parent` whose owners run.
pub fn running_in(parent: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let private = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(PREFIX);
    let paths = entries.flatten().filter(private).map(|entry| entry.path());
    paths.filter(|path| is_own_directory(path) && is_owned(path)).collect()
}

/// True if the owner of a directory runs: it holds the lock of its file.
fn is_owned(path: &Path) -> bool {
    let owner = open_regular(&path.join(OWNER));
    owner.is_some_and(|owner| matches!(owner.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Reads a small regular file of a private directory.
pub fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    open_regular(path)?.take(MAX_FILE_BYTES).read_to_string(&mut text).ok()?;
    Some(text)
}

/// True for a directory that this user owns and no other user can write to. False for a symbolic link.
fn is_own_directory(path: &Path) -> bool {
    let user = rustix::process::geteuid().as_raw();
    path.symlink_metadata()
        .is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0)
}

/// Opens a regular file. `NONBLOCK` is needed because opening a FIFO would otherwise wait for a writer.
fn open_regular(path: &Path) -> Option<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().is_ok_and(|found| found.is_file()).then_some(file)
}

#[cfg(test)]
mod tests;
