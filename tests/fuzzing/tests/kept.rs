//! Runs the kept inputs of each fuzz target, and the seeds made from the tables of the tree, with the fuzzers' checks:
//! no panics, a limited time and limited memory. `tests/fuzz` makes new inputs.

use std::{
    fs, panic,
    path::Path,
    process::{self, Command},
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use tutti_fuzzing::{Target, check, is_of_a_library, made_seeds, remove_files};

/// An input that takes longer is a finding, as in `tests/fuzz`.
const MAX_TIME: Duration = Duration::from_secs(25);

/// One target runs at a time, because memory is counted over all threads.
static RUNNING: Mutex<()> = Mutex::new(());

/// The first panic that is a finding, even if the code under test catches it.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the kept inputs of a target by name, and its seeds.
fn inputs(name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().expect("a folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
    let unpacked = Command::new(script).arg("unpack").arg(folder.path()).arg(name).status();
    assert!(unpacked.expect("python3 starts").success());
    let kept = fs::read_dir(folder.path().join(name)).expect("the kept inputs").map(|file| {
        let path = file.expect("a file").path();
        (path.file_name().expect("a name").to_string_lossy().into_owned(), fs::read(&path).expect("a file"))
    });
    let mut inputs: Vec<_> = kept.collect();
    assert!(!inputs.is_empty(), "no kept inputs");
    let seeds = made_seeds().into_iter().enumerate().filter(|(_, seed)| seed.target == name);
    inputs.extend(seeds.map(|(number, seed)| (format!("seed-{number}"), seed.input)));
    inputs
}

/// Ends the process with the name of the input that has not ended in time. Returns the channel for the names of inputs,
/// each of which stands for the end of the one before.
fn watchdog(target: &str) -> mpsc::Sender<String> {
    let (begun, begins) = mpsc::channel::<String>();
    let target = target.to_owned();
    thread::spawn(move || {
        let mut input = String::new();
        loop {
            match begins.recv_timeout(MAX_TIME) {
                Ok(next) => input = next,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    eprintln!("finding: the input {input} of `{target}` takes over {MAX_TIME:?}");
                    process::abort();
                }
            }
        }
    });
    begun
}

fn run_all(name: &str) {
    let _alone = lock(&RUNNING);
    let target = Target::named(name).expect("the target exists");
    let inputs = inputs(name);
    // A first run initialises all statics, so that their memory is not counted for a later input.
    target.run(&[]);
    let end = panic::take_hook();
    panic::set_hook(Box::new(|panic| {
        if !is_of_a_library(panic) {
            lock(&PANIC).get_or_insert_with(|| panic.to_string());
        }
    }));
    let begun = watchdog(name);
    let finding = inputs.into_iter().find_map(|(file, input)| {
        begun.send(file.clone()).expect("the watchdog listens");
        let caught = panic::catch_unwind(|| check(target, &input));
        let panicked = lock(&PANIC).take();
        panicked.or_else(|| caught.err().map(|_| "a panic".to_owned())).map(|what| (file, what))
    });
    panic::set_hook(end);
    remove_files();
    assert_eq!(finding, None, "an input of `{name}` and what is wrong with it");
}

#[test]
fn bodies_of_http_requests() {
    run_all("http");
}

#[test]
fn messages_of_grpc_clients() {
    run_all("grpc");
}

#[test]
fn messages_among_the_processes_of_a_cluster() {
    run_all("cluster");
}

#[test]
fn files_of_safetensors() {
    run_all("safetensors");
}

#[test]
fn quantised_weights() {
    run_all("quantised");
}

#[test]
fn files_of_gguf() {
    run_all("gguf");
}

#[test]
fn configs_settings_and_topologies() {
    run_all("config");
}

#[test]
fn chat_templates() {
    run_all("template");
}

#[test]
fn stop_strings() {
    run_all("stop");
}

#[test]
fn constraints() {
    run_all("schema");
}

#[test]
fn outputs_with_tool_calls() {
    run_all("tool-parser");
}

#[test]
fn jpeg_pictures() {
    run_all("jpeg");
}

#[test]
fn png_pictures() {
    run_all("png");
}

#[test]
fn webp_pictures() {
    run_all("webp");
}

#[test]
fn wav_recordings() {
    run_all("wav");
}

#[test]
fn mp3_recordings() {
    run_all("mp3");
}

#[test]
fn flac_recordings() {
    run_all("flac");
}
