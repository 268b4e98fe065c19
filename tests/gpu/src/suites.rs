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
    const ONE: &[&str] = &["qwen3", "--exact"];
    const ONE_OF_EACH: &[&str] = &["qwen3", "qwen3_moe", "qwen3_5", "--exact"];
    // Models that are not in the bundle.
    const ALL_PACKED: &[&str] = &["--skip", "qwen3_vl", "--skip", "qwen3_omni"];
    let all =
        [("goldens in f32", "goldens/seed0", ALL_PACKED), ("goldens in bf16", "goldens/bf16", ONE_OF_EACH)];
    let short = [("goldens in f32", "goldens/seed0", ONE)];
    for &(part, models, filter) in if bundle.short { &short[..] } else { &all } {
        let mut tests = command(bundle, "golden-tests");
        tests.args(["--test-threads=1", "--nocapture"]).args(filter);
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
    let folders = std::fs::read_dir(bundle.path("formats/goldens")).into_iter().flatten().flatten();
    let names = folders.map(|folder| format!("goldens/{}", folder.file_name().to_string_lossy()));
    // Without a name, the test would pass without a model. A name that does not exist fails it.
    let names: Vec<String> = names.collect();
    if names.is_empty() { "goldens/none".to_owned() } else { names.join(" ") }
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
