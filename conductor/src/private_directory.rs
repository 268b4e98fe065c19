//! Directories that a conductor has for itself and its workers while it lives.
//!
//! A conductor that is killed leaves them; the next one removes them. Whose owner lives is told by a lock that the kernel
//! lets go of with the process.

use std::{
    fs::{self, File, Permissions, TryLockError},
    io,
    os::unix::fs::PermissionsExt,
    path::Path,
};

use tempfile::TempDir;

const PREFIX: &str = "tutti-conductor-";
/// Locked by the owner for as long as it lives.
const OWNER: &str = "owner";

/// A directory that only this user can enter. It goes away when this is dropped.
#[derive(Debug)]
pub struct PrivateDirectory {
    directory: TempDir,
    _owner: File,
}

impl PrivateDirectory {
    /// Makes one in `parent`, and removes those there whose conductors were killed.
    pub fn new_in(parent: &Path) -> io::Result<Self> {
        sweep(parent);
        let directory = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(parent)?;
        // The name that a sweep looks for is there only once the lock is held.
        let unlocked = directory.path().join("owner.new");
        let owner = File::create(&unlocked)?;
        owner.lock()?;
        fs::rename(&unlocked, directory.path().join(OWNER))?;
        Ok(Self { directory, _owner: owner })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Removes what killed conductors have left. What is not certainly that is left alone, and what cannot be removed does no
/// harm.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let private = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(PREFIX);
    for path in entries.flatten().filter(private).map(|entry| entry.path()) {
        let Ok(owner) = File::open(path.join(OWNER)) else { continue };
        match owner.try_lock() {
            Ok(()) if fs::remove_dir_all(&path).is_ok() => {
                tracing::debug!(directory = %path.display(), "removed what a conductor that was killed has left");
            }
            Ok(()) | Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_private_and_goes_away() {
        let parent = tempfile::tempdir().unwrap();
        let directory = PrivateDirectory::new_in(parent.path()).unwrap();
        let path = directory.path().to_owned();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        drop(directory);
        assert!(!path.exists());
    }

    #[test]
    fn only_what_a_dead_conductor_left_is_swept() {
        let parent = tempfile::tempdir().unwrap();
        let alive = PrivateDirectory::new_in(parent.path()).unwrap();
        let named = |name: &str| parent.path().join(name);
        let (dead, new, other) =
            (named("tutti-conductor-dead"), named("tutti-conductor-new"), named("other"));
        for directory in [&dead, &new, &other] {
            fs::create_dir(directory).unwrap();
        }
        for directory in [&dead, &other] {
            fs::write(directory.join(OWNER), "").unwrap();
            fs::write(directory.join("workers.sock"), "").unwrap();
        }
        sweep(parent.path());
        let left = [alive.path(), &dead, &new, &other].map(Path::exists);
        assert_eq!(left, [true, false, true, true]);
    }
}
