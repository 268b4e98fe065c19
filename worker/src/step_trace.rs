//! `--trace-steps`: writes one JSON line per step, on a separate thread.
//!
//! The thread that makes reports passes each step to the writer without waiting. If the writer has no room, the step is
//! left out and counted as lost. After a failed write, every further step is lost, so a full disk costs only the trace.
//!
//! Each rank has its own file, for example `FILE.rank0`. A process appends to an existing file, so that the steps of an
//! earlier process that died are kept. The first line that each process writes is a header.

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

/// Number of steps that may wait for the writer: several seconds of short steps.
const QUEUED_STEPS: usize = 1024;

/// The engine's side of the trace.
pub struct StepTrace {
    steps: SyncSender<StepRecord>,
    lost: Arc<AtomicU64>,
}

impl StepTrace {
    /// Starts the thread that writes this rank's file. If the thread cannot start or the file cannot be opened, all
    /// steps are lost and one warning is logged.
    pub fn start(path: &Path, rank: Rank, engine: &Engine, budget: usize) -> Self {
        let (steps, inbox) = sync_channel(QUEUED_STEPS);
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
        // If the thread does not start, the receiver of steps is dropped, so each step counts as lost.
        if let Err(error) = thread::Builder::new().name("step-trace".into()).spawn(move || writer.run(&inbox))
        {
            tracing::warn!(%error, "cannot start the step trace's thread; no step is traced");
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
            // Steps that are already in the file's buffer are lost as well, but are not counted.
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
                // The file is flushed before the thread blocks, so that readers of the file soon see every step.
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
            slots: [step.slots_used, step.slots_total],
            snapshots: step.snapshots,
            void_rows: step.void_rows,
            padding_tokens: step.padding_tokens,
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

/// First line that each process writes.
#[derive(Serialize)]
struct Header {
    worker: u32,
    pid: u32,
    budget_tokens: usize,
}

/// Line of one step.
#[derive(Serialize)]
struct Step<'a> {
    worker: u32,
    step: u64,
    /// Name of the walk that the engine ran for all rows together.
    batch_walk: &'a str,
    /// Time at which planning began, in microseconds since 1970.
    start_us: u64,
    /// Time spent preparing the plan while the previous step ran. The device did not wait for this preparation.
    plan_ahead_us: u64,
    /// Time spent planning between the previous step and this one.
    plan_us: u64,
    run_us: u64,
    commit_us: u64,
    tokens: usize,
    /// Limit on `tokens`. Only a prefill that is undivided and alone in its step may exceed this limit.
    budget_tokens: usize,
    /// Number of KV pages in use after the step, and number of KV pages that requests can hold.
    kv_pages: [u32; 2],
    /// Number of slots in use after the step, and number of slots that requests and snapshots can hold.
    slots: [u32; 2],
    /// Number of snapshots of the prefix cache that no request reads.
    snapshots: u32,
    /// Number of rows without an effect, because their requests had ended. `rows` does not contain them.
    void_rows: u32,
    /// Number of tokens of padding that the device computed in addition to `tokens`.
    padding_tokens: u32,
    rows: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct Row<'a> {
    request: u64,
    incarnation: u32,
    walk: &'a str,
    /// Start and end of the computed positions, end excluded.
    range: [usize; 2],
    /// True if a token is sampled from the row's last position.
    terminal: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    failed: bool,
}

#[cfg(test)]
mod tests;
