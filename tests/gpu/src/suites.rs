//! Runs test executables of the bundle. Each of their tests becomes a check of the report.

use crate::Bundle;
use crate::child::{Ended, command, run};
use crate::report::Report;

/// Runs the tests that compare each operation with the CPU device.
pub fn kernels(bundle: &Bundle, report: &mut Report) {
    let mut tests = command(bundle, "kernel-tests");
    tests.arg("--test-threads=1").env("CUDA_TESTS", "required");
    if bundle.short {
        tests.args(["dense::", "flight::"]);
    }
    suite(report, "kernels", &run(bundle, tests, "kernel-tests"));
}

/// Runs the tests that compare the golden models with Hugging Face transformers.
pub fn goldens(bundle: &Bundle, report: &mut Report) {
    let all = ["goldens/seed0", "goldens/bf16"];
    for models in if bundle.short { &all[..1] } else { &all } {
        let part = if *models == all[0] { "goldens in f32" } else { "goldens in bf16" };
        // Each model has a test of its name. A test of a model that is not in the bundle would fail.
        let tests_of = if bundle.short { vec!["qwen3".to_owned()] } else { folders(bundle, models) };
        let mut tests = command(bundle, "golden-tests");
        tests.args(["--test-threads=1", "--nocapture", "--exact"]).args(tests_of);
        tests.env("GOLDEN_MODELS", bundle.path(models)).env("GOLDEN_DEVICE", "cuda");
        suite(report, part, &run(bundle, tests, "golden-tests"));
    }
    if !bundle.short {
        let mut tests = command(bundle, "golden-tests");
        tests.args(["--nocapture", "quantised_checkpoints", "--exact"]).env("GOLDEN_DEVICE", "cuda");
        tests.env("QUANTISED_FORMATS", bundle.path("formats")).env("QUANTISED_MODELS", quantised(bundle));
        suite(report, "goldens of quantised weights", &run(bundle, tests, "golden-tests"));
    }
}

/// The names of the bundle's quantised models.
fn quantised(bundle: &Bundle) -> String {
    let names = folders(bundle, "formats/goldens");
    names.iter().map(|name| format!("goldens/{name}")).collect::<Vec<_>>().join(" ")
}

/// The names of the folders in one of the bundle's folders.
fn folders(bundle: &Bundle, of: &str) -> Vec<String> {
    let entries = std::fs::read_dir(bundle.path(of)).into_iter().flatten().flatten();
    let names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    // Without a name, a suite would pass without a model or run all tests. A name that does not exist fails it.
    if names.is_empty() { vec!["none".to_owned()] } else { names }
}

/// Adds a check for each test in the output.
fn suite(report: &mut Report, part: &str, ended: &Ended) {
    let mut checks = 0;
    for (name, passed) in results(&ended.text) {
        report.check(part, name, passed, if passed { "" } else { &ended.text });
        checks += 1;
    }
    // A suite that crashes between two tests has no failed test. The normal end of the suite is therefore a separate
    // check.
    report.check(part, &format!("all of {checks} tests end"), ended.well && checks > 0, &ended.tail());
}

/// Returns the names of the tests in the output of Rust's test harness, with true for those that passed. Without
/// capture, a test's own output may come between its name and its result.
fn results(text: &str) -> Vec<(&str, bool)> {
    let mut open = None;
    let mut results = Vec::new();
    for line in text.lines() {
        if let Some((name, end)) = line.strip_prefix("test ").and_then(|line| line.split_once(" ... ")) {
            open = Some(name);
            if let Some(passed) = passed(end) {
                results.extend(open.take().map(|name| (name, passed)));
            }
        } else if let Some(passed) = passed(line) {
            results.extend(open.take().map(|name| (name, passed)));
        }
    }
    results
}

fn passed(end: &str) -> Option<bool> {
    match end.trim() {
        "ok" => Some(true),
        "FAILED" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
