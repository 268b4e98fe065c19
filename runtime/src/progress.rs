//! Progress of downloads and loads: bars if standard error is a terminal, log lines otherwise.

use std::{
    collections::HashMap,
    fmt::Display,
    sync::Arc,
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use parking_lot::Mutex;

use crate::telemetry::style;

/// Minimum time between two log lines of one load. The last line of a load is written without this wait.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// A display of the progress of several loads. Clones share the display.
#[derive(Clone)]
pub struct LoadDisplay {
    shown: Arc<Mutex<Shown>>,
}

struct Shown {
    /// `None` if progress is written as log lines.
    bars: Option<MultiProgress>,
    loads: HashMap<String, Load>,
}

/// An unfinished download of a file, or an unfinished load of a worker's model.
struct Load {
    started: Instant,
    last_line: Instant,
    bar: Option<ProgressBar>,
}

impl Default for LoadDisplay {
    fn default() -> Self {
        Self::new(style::is_for_people())
    }
}

impl LoadDisplay {
    /// A display with bars if `bars` is true, with log lines otherwise.
    pub fn new(bars: bool) -> Self {
        let shown = Shown { bars: bars.then(MultiProgress::new), loads: HashMap::new() };
        Self { shown: Arc::new(Mutex::new(shown)) }
    }

    /// Reports that the load `name` (a file, a worker) has `done` of `total` bytes. When all bytes are done, the load's
    /// bar is removed and a log line is written.
    pub fn update(&self, name: impl Display, done: u64, total: u64) {
        let name = name.to_string();
        let mut shown = self.shown.lock();
        let Shown { bars, loads } = &mut *shown;
        let now = Instant::now();
        let load = loads.entry(name.clone()).or_insert_with(|| Load {
            started: now,
            last_line: now,
            bar: bars.as_ref().map(|bars| bars.add(bar(&name))),
        });
        if let Some(bar) = &load.bar {
            bar.set_length(total);
            bar.set_position(done);
        } else if done < total && now - load.last_line >= LINE_EVERY {
            load.last_line = now;
            let percent = done.saturating_mul(100) / total.max(1);
            tracing::info!(load = name, percent, done_bytes = done, total_bytes = total, "loading");
        }
        if done >= total {
            if let Some(bar) = &load.bar {
                bar.finish_and_clear();
            }
            let took = now - load.started;
            loads.remove(&name);
            drop(shown);
            tracing::info!(load = name, total_bytes = total, took_ms = took.as_millis() as u64, "loaded");
        }
    }

    /// Removes the bar of a load that will not finish.
    pub fn abandon(&self, name: impl Display) {
        if let Some(Load { bar: Some(bar), .. }) = self.shown.lock().loads.remove(&name.to_string()) {
            bar.finish_and_clear();
        }
    }
}

fn bar(name: &str) -> ProgressBar {
    let template = "{msg:>24} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    // If the template does not parse, the default style is used.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_message(name.to_owned())
}

#[cfg(test)]
mod tests;
