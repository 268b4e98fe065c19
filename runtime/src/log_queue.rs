//! A bounded queue of log lines for stderr, and a separate thread that writes the lines.
//!
//! The reader of stderr may stop, for example if a log collector hangs. Threads that log never wait for the reader. A
//! line that finds no room in the queue is lost and counted.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use prometheus_client::metrics::counter::Counter;
use tracing_subscriber::fmt::MakeWriter;

use crate::metrics::Registry;

/// Maximum bytes of queued lines.
const ROOM: usize = 4 << 20;
/// Minimum time between two log lines that report lost lines.
const LOSS_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum time for which an ending process waits for the reader of stderr.
const LAST_WAIT: Duration = Duration::from_secs(1);

/// The queue of this process, once logging is set up.
static OF_PROCESS: OnceLock<LogQueue> = OnceLock::new();

/// A queue of lines. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct LogQueue(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    room: usize,
    state: Mutex<State>,
    /// Signalled when lines are added, and when all lines are written.
    changed: Condvar,
    lost: Counter,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<Vec<u8>>,
    /// Bytes of the queued lines and of the line that is being written.
    bytes: usize,
}

impl LogQueue {
    /// The queue of this process, whose thread writes to stderr.
    ///
    /// # Errors
    /// The thread cannot start.
    pub fn of_process() -> io::Result<Self> {
        if let Some(queue) = OF_PROCESS.get() {
            return Ok(queue.clone());
        }
        let queue = Self::new(ROOM, io::stderr())?;
        Ok(OF_PROCESS.get_or_init(|| queue).clone())
    }

    fn new(room: usize, out: impl Write + Send + 'static) -> io::Result<Self> {
        let (state, changed) = Default::default();
        let shared = Arc::new(Shared { room, state, changed, lost: Counter::default() });
        let writer = shared.clone();
        thread::Builder::new().name("log".into()).spawn(move || writer.write_to(out))?;
        Ok(Self(shared))
    }

    /// Registers the count of lost lines.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "log_lines_lost",
            "Log lines that were lost because the reader of stderr was too slow",
            self.0.lost.clone(),
        );
    }

    /// Waits until all lines are written, for at most `longest`.
    fn flush(&self, longest: Duration) {
        let end = Instant::now() + longest;
        let mut state = self.0.state.lock();
        while state.bytes > 0 && !self.0.changed.wait_until(&mut state, end).timed_out() {}
    }
}

impl Shared {
    fn put(&self, line: &[u8]) {
        let mut state = self.state.lock();
        if state.bytes + line.len() > self.room {
            drop(state);
            self.lost.inc();
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line.to_owned());
        drop(state);
        self.changed.notify_all();
    }

    /// Writes queued lines until the process ends. Each line is one call, so that lines of processes that share stderr
    /// do not mix.
    fn write_to(&self, mut out: impl Write) {
        let (mut said, mut when) = (0, None::<Instant>);
        loop {
            let mut state = self.state.lock();
            let line = loop {
                match state.lines.pop_front() {
                    Some(line) => break line,
                    None => self.changed.wait(&mut state),
                }
            };
            drop(state);
            // A failure cannot be reported, because reports go to stderr.
            let _ = out.write_all(&line);
            self.state.lock().bytes -= line.len();
            self.changed.notify_all();
            let lost = self.lost.get();
            if lost > said && when.is_none_or(|when| when.elapsed() >= LOSS_INTERVAL) {
                tracing::warn!(lines = lost - said, "log lines were lost: the reader of stderr was too slow");
                (said, when) = (lost, Some(Instant::now()));
            }
        }
    }
}

/// Writes one line per event.
impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter(&self.0)
    }
}

/// A writer of one line into the queue. It never fails and never waits for the reader of stderr.
pub(crate) struct LineWriter<'a>(&'a Shared);

impl Write for LineWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Number of lines of this process that were lost.
pub(crate) fn lost() -> u64 {
    OF_PROCESS.get().map_or(0, |queue| queue.0.lost.get())
}

/// Waits until stderr has all log lines of this process, for at most [`LAST_WAIT`].
pub(crate) fn flush() {
    if let Some(queue) = OF_PROCESS.get() {
        queue.flush(LAST_WAIT);
    }
}

/// Writes the last line of an ending process to stderr. Gives up after [`LAST_WAIT`] if nobody reads stderr.
pub(crate) fn last_line(line: String) {
    flush();
    let writer = thread::Builder::new().name("last-line".into());
    let (done, wait) = std::sync::mpsc::sync_channel(1);
    let written = writer.spawn(move || {
        let _ = writeln!(io::stderr(), "{line}");
        // The process may have stopped waiting.
        let _ = done.send(());
    });
    if written.is_ok() {
        // An error means that nobody reads stderr. Nothing more can be done.
        let _ = wait.recv_timeout(LAST_WAIT);
    }
}

/// Logs panics like other events. Rust's own hook would write to stderr and wait for its reader.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let backtrace = std::backtrace::Backtrace::capture();
        let trace = match backtrace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("\n{backtrace}"),
            _ => String::new(),
        };
        tracing::error!("thread '{name}' {panic}{trace}");
    }));
}

#[cfg(test)]
mod tests;
