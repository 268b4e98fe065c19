//! Bounds the lines about requests that did not succeed, so that a flood of them does not fill the log.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::Status;

/// Lines per status, outcome and [`WINDOW`].
const LINES: u64 = 50;
const WINDOW: Duration = Duration::from_secs(1);

/// Counts lines by status and outcome. A flood of one kind hides no other.
#[derive(Default)]
pub struct Limiter(Mutex<HashMap<(u32, &'static str), Window>>);

struct Window {
    began: Instant,
    lines: u64,
    /// Lines that were left out and that no line has reported.
    left_out: u64,
}

impl Limiter {
    /// Counts a request. Returns `None` if the request gets no line. Otherwise returns how many earlier requests of its
    /// kind got none and are not reported yet.
    pub fn count(&self, status: Status, outcome: &'static str, now: Instant) -> Option<u64> {
        let status = match status {
            Status::Http(status) => status.into(),
            // Above all statuses of HTTP.
            Status::Grpc(code) => u32::from(u16::MAX) + code as u32,
        };
        let mut windows = self.0.lock();
        let window = windows.entry((status, outcome)).or_insert(Window { began: now, lines: 0, left_out: 0 });
        if now.saturating_duration_since(window.began) >= WINDOW {
            (window.began, window.lines) = (now, 0);
        }
        if window.lines >= LINES {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests;
