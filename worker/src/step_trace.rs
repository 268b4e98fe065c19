//! `--trace-steps`: one JSON line for each step, written by a thread of its own.
//!
//! The engine's thread hands each step over without waiting. A step that the writer has no room for is counted and left
//! out, and so is every step after the file could not be written: a full disk costs the trace and nothing else.
//!
//! The file is `FILE.rank0` and so on. A process appends to what is there, beginning with a header line, so that the
//! steps before a worker's death are kept.

use std::{
    fs::OpenOptions,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TryRecvError, sync_channel},
    },
    thread,
    time::{Duration, UNIX_EPOCH},
};

use serde::Serialize;
use tutti_engine::{Engine, RowRecord, StepObserver, StepRecord};
use tutti_proto::{
    Rank,
    declaration::{ModelDeclaration, WalkId},
};

/// Steps that may wait for the writer: some seconds of short ones.
const ROOM: usize = 1024;

/// The engine's end.
pub struct StepTrace {
    steps: SyncSender<StepRecord>,
    lost: Arc<AtomicU64>,
}

impl StepTrace {
    /// Opens the rank's file and starts its writer. Where that fails, all steps are lost, with one warning.
    pub fn start(path: &Path, rank: Rank, engine: &Engine, budget: usize) -> Self {
        let (steps, inbox) = sync_channel(ROOM);
        let lost = Arc::new(AtomicU64::new(0));
        let mut path = path.as_os_str().to_owned();
        path.push(format!(".rank{rank}"));
        let writer = Writer {
            path: path.into(),
            rank,
            budget,
            declaration: engine.model().declaration().clone(),
            lost: lost.clone(),
        };
        // Without a thread the inbox is dropped, and each step counted as lost.
        if let Err(error) = thread::Builder::new().name("step-trace".into()).spawn(move || writer.run(&inbox))
        {
            tracing::warn!(%error, "no thread for the step trace; there will be none");
        }
        Self { steps, lost }
    }
}

impl StepObserver for StepTrace {
    fn observe(&mut self, step: StepRecord) {
        if self.steps.try_send(step).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

struct Writer {
    path: PathBuf,
    rank: Rank,
    budget: usize,
    declaration: ModelDeclaration,
    lost: Arc<AtomicU64>,
}

impl Writer {
    fn run(self, steps: &Receiver<StepRecord>) {
        if let Err(error) = self.write(steps) {
            tracing::warn!(file = %self.path.display(), %error, "the step trace ends here");
            // Also those that a buffer still held are gone, but not counted.
            for _ in steps {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn write(&self, steps: &Receiver<StepRecord>) -> io::Result<()> {
        let file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        let mut file = BufWriter::with_capacity(1 << 16, file);
        line(&mut file, &self.header())?;
        file.flush()?;
        loop {
            let step = match steps.try_recv() {
                Ok(step) => step,
                Err(TryRecvError::Disconnected) => return file.flush(),
                // Readers see every step as soon as nothing more important is to be written.
                Err(TryRecvError::Empty) => {
                    file.flush()?;
                    let Ok(step) = steps.recv() else { return Ok(()) };
                    step
                }
            };
            line(&mut file, &self.step(&step))?;
        }
    }

    fn header(&self) -> Header {
        Header { worker: self.rank.0, pid: std::process::id(), budget_tokens: self.budget }
    }

    fn step<'a>(&'a self, step: &StepRecord) -> Step<'a> {
        let started = step.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        Step {
            worker: self.rank.0,
            step: step.number.0,
            batch_walk: self.walk(step.batch_walk),
            start_us: us(started),
            plan_ahead_us: us(step.times.plan_ahead),
            plan_us: us(step.times.plan),
            run_us: us(step.times.run),
            commit_us: us(step.times.commit),
            tokens: step.rows.iter().map(|row| row.positions.len()).sum(),
            budget_tokens: self.budget,
            kv_pages: [step.kv_pages_used, step.kv_pages_total],
            rows: step.rows.iter().map(|row| self.row(row)).collect(),
        }
    }

    fn row(&self, row: &RowRecord) -> Row<'_> {
        Row {
            request: row.key.request.0,
            incarnation: row.key.incarnation.0,
            walk: self.walk(row.walk),
            range: [row.positions.start, row.positions.end],
            terminal: row.terminal,
            failed: row.failed,
        }
    }

    fn walk(&self, id: WalkId) -> &str {
        self.declaration.walk(id).map_or("undeclared", |walk| &walk.name)
    }
}

fn us(time: Duration) -> u64 {
    time.as_micros() as u64
}

fn line(file: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *file, value)?;
    file.write_all(b"\n")
}

/// The first line of a process.
#[derive(Serialize)]
struct Header {
    worker: u32,
    pid: u32,
    budget_tokens: usize,
}

/// Any other line.
#[derive(Serialize)]
struct Step<'a> {
    worker: u32,
    step: u64,
    /// What the engine ran.
    batch_walk: &'a str,
    /// When its turn began, in microseconds since 1970.
    start_us: u64,
    /// Planning that was done while the step before ran; nothing waited for it.
    plan_ahead_us: u64,
    /// The rest of it, between that step and this one.
    plan_us: u64,
    run_us: u64,
    commit_us: u64,
    tokens: usize,
    /// The most that `tokens` can be, but for an atomic prefill alone.
    budget_tokens: usize,
    /// Held after the step, and in the pool.
    kv_pages: [u32; 2],
    rows: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    request: u64,
    incarnation: u32,
    walk: &'a str,
    /// Positions computed, the end not included.
    range: [usize; 2],
    /// Whether a token was to be sampled.
    terminal: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    failed: bool,
}

#[cfg(test)]
mod tests {
    use tutti_engine::StepTimes;
    use tutti_proto::{
        StepNumber,
        cluster::v1 as pb,
        declaration::{Walk, WalkKind},
    };

    use super::*;

    fn record(number: u64) -> StepRecord {
        let row = RowRecord {
            key: pb::GraphKey { request: 7, incarnation: 1, graph: 0 }.into(),
            walk: WalkId(0),
            positions: 4..9,
            terminal: true,
            failed: false,
        };
        StepRecord {
            number: StepNumber(number),
            batch_walk: WalkId(1),
            rows: vec![row],
            started: UNIX_EPOCH + Duration::from_micros(12),
            times: StepTimes {
                plan_ahead: Duration::from_micros(2),
                run: Duration::from_micros(3),
                ..StepTimes::default()
            },
            kv_pages_used: 1,
            kv_pages_total: 2,
        }
    }

    fn writer(path: &Path) -> (Writer, Arc<AtomicU64>) {
        let walk = |name: &str| Walk { name: name.into(), nodes: vec![], kind: WalkKind::Mixed };
        let declaration =
            ModelDeclaration::new(vec![], vec![walk("prefill_text"), walk("thinker_step")], vec![]).unwrap();
        let lost = Arc::new(AtomicU64::new(0));
        (Writer { path: path.into(), rank: Rank(3), budget: 64, declaration, lost: lost.clone() }, lost)
    }

    #[test]
    fn each_step_is_a_line_and_each_process_begins_with_a_header() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("steps.rank3");
        for process in 0..2 {
            let (sender, inbox) = sync_channel(2);
            sender.send(record(process)).unwrap();
            drop(sender);
            writer(&path).0.run(&inbox);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[2]["budget_tokens"], 64);
        let expected = serde_json::json!({
            "worker": 3, "step": 1, "batch_walk": "thinker_step", "start_us": 12,
            "plan_ahead_us": 2, "plan_us": 0, "run_us": 3, "commit_us": 0, "tokens": 5, "budget_tokens": 64, "kv_pages": [1, 2],
            "rows": [{
                "request": 7, "incarnation": 1, "walk": "prefill_text", "range": [4, 9], "terminal": true,
            }],
        });
        assert_eq!(lines[3], expected);
    }

    #[test]
    fn a_full_disk_costs_the_trace_and_every_lost_step_is_counted() {
        let (writer, lost) = writer(Path::new("/dev/full"));
        let (steps, inbox) = sync_channel(2);
        let mut trace = StepTrace { steps, lost };
        trace.observe(record(0));
        let writing = thread::spawn(move || writer.run(&inbox));
        trace.observe(record(1));
        let StepTrace { steps, lost } = trace;
        drop(steps);
        writing.join().unwrap();
        assert!(lost.load(Ordering::Relaxed) >= 1);
    }

    #[test]
    fn a_slow_writer_never_stops_the_engine() {
        let (steps, _inbox) = sync_channel(1);
        let mut trace = StepTrace { steps, lost: Arc::default() };
        for number in 0..10 {
            trace.observe(record(number));
        }
        assert_eq!(trace.lost(), 9);
    }
}
