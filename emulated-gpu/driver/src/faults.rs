//! Faults on demand: rules that make calls fail, hang or never join.
//!
//! `EMULATED_GPU_FAULTS` is a list of rules with `;` between them. A rule is a kind and conditions:
//!
//! ```text
//! out-of-memory at=12              the 12th allocation of a device
//! fail kernel=argmax at=3          the 3rd launch of `argmax` ends with a sticky CUDA_ERROR_LAUNCH_FAILED
//! break at=9                       the memory fails at the 9th launch, with a sticky CUDA_ERROR_ECC_UNCORRECTABLE
//! refuse kernel=argmax             the first launch of `argmax` returns CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
//! hang device=1 when=/tmp/x/hang   the first launch on device 1 after the file appears never ends
//! never-joins kernel=ncclAllReduce device=1   rank on device 1 never joins its first all-reduce
//! ```
//!
//! `at` counts the events that meet the other conditions, from 1, in one process. `when` names a file. The rule removes
//! the file when it acts, so that only one process acts on it. A rule with neither condition acts on the first event. A
//! product of cuBLASLt counts as a launch of `cublasLtMatmul`, and `refuse` has no effect on it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Effect of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// An allocation returns `OUT_OF_MEMORY`.
    OutOfMemory,
    /// A kernel fails while it runs.
    Fail,
    /// The device's memory fails before a kernel runs.
    Break,
    /// A launch returns an error at the call.
    Refuse,
    /// The device runs no more work, and calls that wait for it never return.
    Hang,
    /// A rank never joins a collective or the set-up of a communicator.
    NeverJoins,
}

/// One rule of `EMULATED_GPU_FAULTS`.
#[derive(Debug)]
struct Rule {
    kind: FaultKind,
    kernel: Option<String>,
    device: Option<usize>,
    at: Option<u64>,
    when: Option<PathBuf>,
    seen: AtomicU64,
}

/// All rules of a process.
#[derive(Debug, Default)]
pub struct FaultPlan(Vec<Rule>);

impl FaultPlan {
    /// Reads a list of rules.
    ///
    /// # Errors
    ///
    /// The first rule or condition that cannot be parsed.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rules = text.split(';').map(str::trim).filter(|rule| !rule.is_empty());
        rules.map(Rule::parse).collect::<Result<_, _>>().map(FaultPlan)
    }

    /// Returns the fault for the next event, if a rule of one of `kinds` acts on it. The event happens on `device`, in
    /// the kernel or call `name`. Each rule whose conditions the event meets counts the event.
    pub fn next(&self, kinds: &[FaultKind], device: usize, name: &str) -> Option<FaultKind> {
        let mut acting = None;
        for rule in self.0.iter().filter(|rule| kinds.contains(&rule.kind)) {
            if rule.meets(device, name) && rule.acts() {
                acting = acting.or(Some(rule.kind));
            }
        }
        acting
    }
}

impl Rule {
    fn parse(text: &str) -> Result<Rule, String> {
        let mut words = text.split_whitespace();
        let kind = match words.next() {
            Some("out-of-memory") => FaultKind::OutOfMemory,
            Some("fail") => FaultKind::Fail,
            Some("break") => FaultKind::Break,
            Some("refuse") => FaultKind::Refuse,
            Some("hang") => FaultKind::Hang,
            Some("never-joins") => FaultKind::NeverJoins,
            other => return Err(format!("unknown fault {:?} in {text:?}", other.unwrap_or_default())),
        };
        let mut rule =
            Rule { kind, kernel: None, device: None, at: None, when: None, seen: AtomicU64::new(0) };
        for word in words {
            let (key, value) =
                word.split_once('=').ok_or_else(|| format!("no value for {word:?} in {text:?}"))?;
            let number =
                || value.parse::<u64>().map_err(|_| format!("no number for {key}: {value:?} in {text:?}"));
            match key {
                "kernel" => rule.kernel = Some(value.to_owned()),
                "device" => rule.device = Some(number()? as usize),
                "at" => rule.at = Some(number()?),
                "when" => rule.when = Some(PathBuf::from(value)),
                _ => return Err(format!("unknown condition {key:?} in {text:?}")),
            }
        }
        Ok(rule)
    }

    fn meets(&self, device: usize, name: &str) -> bool {
        self.device.is_none_or(|d| d == device) && self.kernel.as_deref().is_none_or(|k| k == name)
    }

    /// Counts an event. Returns true if the rule acts on the event.
    fn acts(&self) -> bool {
        let event = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
        match (&self.when, self.at) {
            (None, at) => event == at.unwrap_or(1),
            // If several processes see the file, only one of them succeeds in removing the file.
            (Some(file), at) => event >= at.unwrap_or(1) && std::fs::remove_file(file).is_ok(),
        }
    }
}

#[cfg(test)]
mod tests;
