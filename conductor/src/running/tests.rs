use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

fn note(cluster: &str) -> Note {
    Note { cluster: cluster.into(), cluster_token_file: Some("/secret".into()), model: "tiny".into(), pid: 7 }
}

#[test]
fn a_note_is_found_while_its_conductor_runs() {
    let parent = tempfile::tempdir().unwrap();
    assert!(Note::all_in(parent.path()).is_empty());
    let left = note("http://127.0.0.1:1").leave_in(parent.path()).unwrap();
    assert_eq!(Note::all_in(parent.path()), [note("http://127.0.0.1:1")]);
    let directory = fs::read_dir(parent.path()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(directory.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    drop(left);
    assert!(Note::all_in(parent.path()).is_empty() && !directory.exists());
}

#[test]
fn notes_of_killed_conductors_and_of_others_do_not_count() {
    let parent = tempfile::tempdir().unwrap();
    // A killed conductor leaves all but its lock.
    let killed = parent.path().join("tutti-conductor-killed");
    fs::create_dir(&killed).unwrap();
    fs::write(killed.join("owner"), "").unwrap();
    fs::write(killed.join(NOTE), serde_json::to_vec(&note("http://127.0.0.1:2")).unwrap()).unwrap();
    assert!(Note::all_in(parent.path()).is_empty());
    // A directory to which others may write, and a link.
    let left = note("http://127.0.0.1:3").leave_in(parent.path()).unwrap();
    let open = left._directory.path().to_owned();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    symlink(&open, parent.path().join("tutti-conductor-link")).unwrap();
    assert!(Note::all_in(parent.path()).is_empty());
    fs::set_permissions(&open, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(Note::all_in(parent.path()), [note("http://127.0.0.1:3")]);
    // A note that is no note.
    fs::write(open.join(NOTE), "half").unwrap();
    assert!(Note::all_in(parent.path()).is_empty());
}

#[test]
fn one_conductor_is_chosen_and_several_are_listed() {
    assert_eq!(Note::only(vec![note("unix:/a")]).unwrap(), note("unix:/a"));
    let none = Note::only(Vec::new()).unwrap_err().to_string();
    assert!(none.starts_with("conductor: is missing, and no conductor of this user runs"), "{none}");
    let several = Note::only(vec![note("unix:/a"), note("unix:/b")]).unwrap_err().to_string();
    assert!(
        several.contains("2 conductors run") && several.contains("unix:/a (process 7, model tiny), unix:/b"),
        "{several}"
    );
}
