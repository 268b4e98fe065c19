use std::{fs::Permissions, os::unix::fs::PermissionsExt, time::Instant};

use parking_lot::Mutex;
use tempfile::TempDir;

use super::*;

/// A number in a file, which is read again as servers read their certificates. A file without a number changes nothing.
struct Number {
    directory: TempDir,
    in_force: Arc<Mutex<u32>>,
    reloads: u32,
    failing: Failing,
}

impl Number {
    fn new(text: &str) -> (Self, WatchedFiles) {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("number");
        fs::write(&file, text).unwrap();
        let files = WatchedFiles::new(vec![directory.path().join("other"), file.clone()]);
        let in_force = Arc::new(Mutex::new(read(&file).unwrap()));
        (Self { directory, in_force, reloads: 0, failing: Failing::default() }, files)
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("number")
    }

    /// Replaces the file by a new one, as Kubernetes does.
    fn replace(&self, text: &str) {
        let new = self.directory.path().join("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.file()).unwrap();
    }

    fn reload(&self) -> impl Fn() -> Result<(), Error> + Send + Sync + 'static {
        let (file, in_force) = (self.file(), self.in_force.clone());
        move || {
            *in_force.lock() = read(&file)?;
            Ok(())
        }
    }

    /// The number in force after a check, and the number of reloads so far.
    fn checked(&mut self, files: &mut WatchedFiles) -> (u32, u32) {
        let (reload, reloads) = (self.reload(), Mutex::new(0));
        files.check(&self.failing, || {
            *reloads.lock() += 1;
            reload()
        });
        self.reloads += reloads.into_inner();
        (*self.in_force.lock(), self.reloads)
    }
}

fn read(file: &Path) -> Result<u32, Error> {
    let text = fs::read_to_string(file).map_err(|e| Error::invalid("number", e.to_string()))?;
    text.parse().map_err(|_| Error::invalid("number", format!("{text:?} is not a number")))
}

#[test]
fn files_are_read_again_once_per_change_and_a_bad_one_changes_nothing() {
    let (mut number, mut files) = Number::new("1");
    assert_eq!(number.checked(&mut files), (1, 0));
    number.replace("2");
    assert_eq!(number.checked(&mut files), (2, 1));
    assert_eq!(number.checked(&mut files), (2, 1));
    number.replace("many");
    assert_eq!(number.checked(&mut files), (2, 2));
    fs::remove_file(number.file()).unwrap();
    assert_eq!(number.checked(&mut files), (2, 3));
    number.replace("3");
    assert_eq!(number.checked(&mut files), (3, 4));
    // The second watched file counts too, once it exists.
    fs::write(number.directory.path().join("other"), "").unwrap();
    assert_eq!(number.checked(&mut files), (3, 5));
    assert_eq!(number.failing.failures.get(), 2);
}

#[test]
fn a_file_is_read_again_when_its_permissions_change() {
    let (mut number, mut files) = Number::new("1");
    let written = fs::metadata(number.file()).unwrap().modified().unwrap();
    // The kernel's clock for file times is coarse, so the first change may have the same time as the write.
    let deadline = Instant::now() + Duration::from_secs(60);
    while Stamp::of(&number.file()) == files.seen[1] {
        assert!(Instant::now() < deadline, "a change of permissions is not seen");
        fs::set_permissions(number.file(), Permissions::from_mode(0o400)).unwrap();
    }
    assert_eq!(fs::metadata(number.file()).unwrap().modified().unwrap(), written);
    assert_eq!(number.checked(&mut files), (1, 1));
    assert_eq!(number.checked(&mut files), (1, 1));
}

#[tokio::test]
async fn a_change_is_noticed_that_was_made_before_files_are_followed() {
    let (number, files) = Number::new("1");
    number.replace("2");
    let following =
        tokio::spawn(files.follow_every(Duration::from_millis(1), number.failing.clone(), number.reload()));
    let until = async |value: u32| {
        let changed = async {
            while *number.in_force.lock() != value {
                sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), changed).await.unwrap();
    };
    until(2).await;
    number.replace("many");
    number.replace("3");
    until(3).await;
    following.abort();
}
