//! Results: checks that passed or failed, and figures. Each result is printed at once and also kept for the JSON file.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tutti_measure::machine::Machine;

/// Results of all parts.
pub struct Report {
    file: PathBuf,
    device: Option<String>,
    checks: Vec<Value>,
    figures: Vec<Value>,
    seconds: f64,
    failed: usize,
}

impl Report {
    pub fn new(file: PathBuf) -> Self {
        Self { file, device: None, checks: Vec::new(), figures: Vec::new(), seconds: 0.0, failed: 0 }
    }

    /// Adds a check. `detail` says what went wrong, or gives more facts about a check that passed.
    pub fn check(&mut self, part: &str, name: &str, passed: bool, detail: &str) {
        let mark = if passed { "passed" } else { "FAILED" };
        println!("{mark}  {part}: {name}");
        if !passed {
            println!("{detail}");
            self.failed += 1;
        }
        self.checks.push(json!({ "part": part, "name": name, "passed": passed, "detail": detail }));
    }

    /// Adds the figures of one model to the JSON file.
    pub fn figures(&mut self, figures: Value) {
        self.figures.push(figures);
    }

    /// Keeps the name of the device. Later names are ignored.
    pub fn device(&mut self, name: &str) {
        self.device.get_or_insert_with(|| name.to_owned());
    }

    /// Writes the results so far, after a part that took `time`.
    pub fn write(&mut self, time: Duration) {
        self.seconds += time.as_secs_f64();
        let all = json!({
            "device": self.device, "machine": Machine::this(), "seconds": self.seconds, "passed": self.checks.len() - self.failed,
            "failed": self.failed, "checks": self.checks, "figures": self.figures,
        });
        let text = serde_json::to_string_pretty(&all).unwrap_or_default();
        if let Err(error) = fs::write(&self.file, text) {
            println!("{}: {error}", self.file.display());
        }
    }

    /// Prints how many checks passed and failed. Returns true if at least one check ran and none failed.
    pub fn end(&self) -> bool {
        let device = self.device.as_deref().unwrap_or("no device has told its name");
        let (ran, failed) = (self.checks.len(), self.failed);
        println!("== {device}: {} passed, {failed} failed in {:.0} s", ran - failed, self.seconds);
        println!("== results: {}", self.file.display());
        ran > 0 && failed == 0
    }
}
