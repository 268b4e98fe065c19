//! How far downloads and loads are: bars where standard error is a terminal, log lines otherwise.

use std::{
    collections::HashMap,
    fmt::Display,
    io::{IsTerminal, stderr},
    sync::Arc,
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, HumanDuration, MultiProgress, ProgressBar, ProgressStyle};
use parking_lot::Mutex;

/// Log lines of one load are at least this far apart, but for the last.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows how far several loads are, side by side. Clones show on the same display.
#[derive(Clone)]
pub struct LoadDisplay {
    shown: Arc<Mutex<Shown>>,
}

struct Shown {
    /// `None` where nobody watches a terminal.
    bars: Option<MultiProgress>,
    loads: HashMap<String, Load>,
}

/// One load that is not done yet.
struct Load {
    started: Instant,
    last_line: Instant,
    bar: Option<ProgressBar>,
}

impl Default for LoadDisplay {
    fn default() -> Self {
        Self::new(stderr().is_terminal())
    }
}

impl LoadDisplay {
    /// Bars where `bars` is set, log lines otherwise.
    pub fn new(bars: bool) -> Self {
        let shown = Shown { bars: bars.then(MultiProgress::new), loads: HashMap::new() };
        Self { shown: Arc::new(Mutex::new(shown)) }
    }

    /// `who` (a file, a worker) has `done` of `total` bytes. When all are done its bar goes away and a line stays.
    pub fn update(&self, who: impl Display, done: u64, total: u64) {
        let who = who.to_string();
        let mut shown = self.shown.lock();
        let Shown { bars, loads } = &mut *shown;
        let now = Instant::now();
        let load = loads.entry(who.clone()).or_insert_with(|| Load {
            started: now,
            last_line: now,
            bar: bars.as_ref().map(|bars| bars.add(bar(&who))),
        });
        if let Some(bar) = &load.bar {
            bar.set_length(total);
            bar.set_position(done);
        } else if done < total && now - load.last_line >= LINE_EVERY {
            load.last_line = now;
            let percent = done.saturating_mul(100) / total.max(1);
            tracing::info!(load = who, percent, done = %HumanBytes(done), total = %HumanBytes(total), "loading");
        }
        if done >= total {
            if let Some(bar) = &load.bar {
                bar.finish_and_clear();
            }
            let took = now - load.started;
            loads.remove(&who);
            drop(shown);
            tracing::info!(load = who, total = %HumanBytes(total), took = %HumanDuration(took), "loaded");
        }
    }

    /// Takes away the bar of a load that will not finish.
    pub fn abandon(&self, who: impl Display) {
        if let Some(Load { bar: Some(bar), .. }) = self.shown.lock().loads.remove(&who.to_string()) {
            bar.finish_and_clear();
        }
    }
}

fn bar(who: &str) -> ProgressBar {
    let template = "{msg:>24} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    // A template that does not parse would cost the looks, not the load.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_message(who.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finished_or_abandoned_load_is_forgotten() {
        for bars in [false, true] {
            let display = LoadDisplay::new(bars);
            let waiting = || display.shown.lock().loads.len();
            display.update("worker 0", 1, 10);
            display.update("worker 1", 10, 10);
            assert_eq!(waiting(), 1);
            display.clone().update("worker 0", 10, 10);
            assert_eq!(waiting(), 0);
            display.update("worker 2", 0, 10);
            display.abandon("worker 2");
            assert_eq!(waiting(), 0);
        }
    }
}
