//! Runs the blocks of a launch on host threads. The warps of a block take turns on one thread.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::fault::{Fault, FaultKind};
use crate::memory::{POISON, Snapshot};
use crate::program::{Fill, Program, Special};
use crate::{Checks, DeviceMemory, Grid};

use super::global_shadow::Orders;
use super::paths::{Path, Stop};
use super::rows::Row;
use super::shared_shadow::SharedShadow;
use super::warp::{State, Warp};

/// Number of instructions per turn of a warp, without and with a seed.
const SLICE: u64 = 1 << 14;
const SEEDED_SLICE: u64 = 200;
/// Time for which a launch runs on one host thread before it starts others. Other threads would not make a shorter
/// launch faster.
const ALONE: Duration = Duration::from_micros(150);
/// Number of instructions after which a block counts as stuck. So many instructions take minutes.
const STUCK: u64 = 1 << 34;

/// The state that all blocks of a launch share.
pub(crate) struct Run<'a> {
    pub program: &'a Program,
    pub kernel: &'a str,
    pub grid: Grid,
    pub parameters: &'a [u8],
    pub memory: Snapshot,
    pub device: &'a DeviceMemory,
    /// Device addresses of the module's variables, by index.
    pub variables: Vec<u64>,
    pub checks: Checks,
    /// True if a shadow records the accesses to global memory.
    pub watched: bool,
    /// True if a shadow records the accesses to shared memory.
    pub shadows: bool,
    pub launch_number: u32,
    pub orders: Orders,
    /// True if `cp.async` copies at once, false if it copies when the lane waits. PTX allows both.
    pub early_copies: bool,
}

/// Memory of a host thread that runs blocks, kept between launches.
#[derive(Default)]
struct Arena {
    files: Vec<Row<u64>>,
    shared: Vec<Row<u64>>,
    local: Vec<Row<u64>>,
}

thread_local! {
    static ARENA: RefCell<Arena> = RefCell::default();
}

/// Returns the next pseudo-random number (xorshift).
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Order of the blocks of a grid. The n-th block is `(n * step + start) % blocks`; `step` and `blocks` are coprime, so
/// each block comes exactly once.
struct BlockOrder {
    next: AtomicU64,
    blocks: u64,
    step: u64,
    start: u64,
}

impl BlockOrder {
    fn new(blocks: u64, seed: Option<u64>) -> Self {
        let (mut step, mut start) = (1, 0);
        if let Some(seed) = seed {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            start = random(&mut state) % blocks;
            step = random(&mut state) % blocks + 1;
            while gcd(step, blocks) != 1 {
                step += 1;
            }
        }
        BlockOrder { next: AtomicU64::new(0), blocks, step, start }
    }

    fn take(&self) -> Option<u64> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let block = u128::from(index) * u128::from(self.step) + u128::from(self.start);
        (index < self.blocks).then_some((block % u128::from(self.blocks)) as u64)
    }

    fn left(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.blocks
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// State that the host threads of a launch share.
struct Shared {
    order: BlockOrder,
    fault: Mutex<Option<Box<Fault>>>,
    stop: AtomicBool,
}

/// Runs all blocks of a launch.
pub(crate) fn run_blocks(run: &Run<'_>) -> Result<(), Box<Fault>> {
    let blocks = run.grid.block_count();
    let shared = Shared {
        order: BlockOrder::new(blocks, run.checks.seed),
        fault: Mutex::new(None),
        stop: AtomicBool::new(false),
    };
    let threads = match run.checks.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let threads = threads.min(usize::try_from(blocks).unwrap_or(usize::MAX));
    let until = (threads > 1).then(|| Instant::now() + ALONE);
    work(run, &shared, until);
    if shared.order.left() && !shared.stop.load(Ordering::Relaxed) {
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(|| work(run, &shared, None));
            }
            work(run, &shared, None);
        });
    }
    match shared.fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(fault) => Err(fault),
        None => Ok(()),
    }
}

/// Grows `rows` to hold `bytes` bytes and returns the first byte's address.
fn reserve(rows: &mut Vec<Row<u64>>, bytes: usize) -> *mut u8 {
    let n = bytes.div_ceil(size_of::<Row<u64>>()) + 1;
    if rows.len() < n {
        rows.resize(n, Row([0; 32]));
    }
    rows.as_mut_ptr().cast()
}

/// Runs blocks until no block is left, a block faults, or `until` has passed.
fn work(run: &Run<'_>, shared: &Shared, until: Option<Instant>) {
    ARENA.with_borrow_mut(|arena| {
        let mut worker = Worker::new(run, arena);
        while !shared.stop.load(Ordering::Relaxed) {
            let Some(block) = shared.order.take() else { break };
            // SAFETY: the arena is as large as program and grid require.
            unsafe { worker.run_block(block) };
            if let Some(fault) = worker.warp.fault.take() {
                shared.stop.store(true, Ordering::Relaxed);
                shared.fault.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(fault);
            }
            if until.is_some_and(|until| Instant::now() > until) {
                break;
            }
        }
    });
}

/// A host thread that runs blocks.
struct Worker<'a> {
    warp: Warp<'a>,
    states: Vec<State>,
    order: Vec<usize>,
    random: u64,
    files: *mut u8,
    local: *mut u8,
}

impl<'a> Worker<'a> {
    fn new(run: &'a Run<'a>, arena: &mut Arena) -> Self {
        let program = run.program;
        let threads = run.grid.threads_per_block() as usize;
        let warps = threads.div_ceil(32);
        let shared_bytes = program.shared_bytes + run.grid.dynamic_shared_bytes;
        let files = reserve(&mut arena.files, program.file_bytes as usize * warps);
        let local = reserve(&mut arena.local, program.local_bytes as usize * 32 * warps);
        let mut worker = Worker {
            warp: Warp {
                file: files,
                warp_size_in_32: 1,
                program,
                run,
                shared: reserve(&mut arena.shared, shared_bytes as usize),
                shared_bytes,
                local,
                index: 0,
                block: [0; 3],
                block_index: 0,
                pc: 0,
                state: State::default(),
                shadow: if run.shadows { SharedShadow::new(shared_bytes) } else { SharedShadow::default() },
                last_allocation: usize::MAX,
                fault: None,
                steps: 0,
            },
            states: (0..warps).map(|_| State::default()).collect(),
            order: (0..warps).collect(),
            random: run.checks.seed.unwrap_or(0).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            files,
            local,
        };
        worker.fill_rows(|_| true);
        worker
    }

    /// Fills the fixed rows of all warps, but only rows whose content `wanted` accepts.
    fn fill_rows(&mut self, wanted: impl Fn(Fill) -> bool) {
        let program = self.warp.program;
        for index in 0..self.states.len() {
            self.enter(index);
            for &(offset, width, fill) in program.rows.iter().filter(|row| wanted(row.2)) {
                // SAFETY: the program's rows lie in its register file.
                unsafe { self.warp.fill_row(offset, width, fill) };
            }
        }
    }

    /// Makes the warp at `index` the running warp. The caller swaps in the warp's state.
    fn enter(&mut self, index: usize) {
        let program = self.warp.program;
        self.warp.index = index as u32;
        // SAFETY: the arena holds the files and the local memory of all warps.
        unsafe {
            self.warp.file = self.files.add(index * program.file_bytes as usize);
            self.warp.local = self.local.add(index * 32 * program.local_bytes as usize);
        }
    }

    fn begin(&mut self, block: u64) {
        let [x, y, _] = self.warp.run.grid.blocks.map(u64::from);
        self.warp.block = [(block % x) as u32, (block / x % y) as u32, (block / x / y) as u32];
        self.warp.block_index = block as u32;
        if self.warp.run.shadows {
            self.warp.shadow.begin_block();
            // SAFETY: the arena holds `shared_bytes` bytes of shared memory.
            unsafe { self.warp.shared.write_bytes(POISON, self.warp.shared_bytes as usize) };
        }
        self.fill_rows(|fill| matches!(fill, Fill::Special(Special::Block(_))));
        let threads = self.warp.run.grid.threads_per_block() as u32;
        for (index, state) in self.states.iter_mut().enumerate() {
            let lanes = (threads - index as u32 * 32).min(32);
            state.alive = u32::MAX >> (32 - lanes);
            state.paths.clear();
            state.paths.push(Path { pc: 0, mask: state.alive, waits: false });
            state.copies.clear();
            state.barrier = None;
            state.furthest_first = false;
        }
    }

    fn shuffle(&mut self) {
        for k in (1..self.order.len()).rev() {
            let other = random(&mut self.random) as usize % (k + 1);
            self.order.swap(k, other);
        }
    }

    /// Runs a block to its end or to a fault.
    ///
    /// # Safety
    ///
    /// The arena is as large as program and grid require.
    unsafe fn run_block(&mut self, block: u64) {
        self.begin(block);
        let seeded = self.warp.run.checks.seed.is_some();
        let slice = if seeded { SEEDED_SLICE } else { SLICE };
        let begun = self.warp.steps;
        loop {
            if seeded {
                self.shuffle();
            }
            let mut ran = false;
            for turn in 0..self.order.len() {
                let index = self.order[turn];
                if self.states[index].alive == 0 || self.states[index].barrier.is_some() {
                    continue;
                }
                ran = true;
                self.enter(index);
                std::mem::swap(&mut self.warp.state, &mut self.states[index]);
                // SAFETY: the caller promises that the arena is as large as program and grid require.
                let stop = unsafe { self.warp.run_slice(slice) };
                std::mem::swap(&mut self.warp.state, &mut self.states[index]);
                match stop {
                    Stop::Barrier(barrier) => self.states[index].barrier = Some(barrier),
                    Stop::Ended => self.states[index].alive = 0,
                    Stop::Slice => {}
                    Stop::Fault => return,
                }
            }
            if self.states.iter().all(|s| s.alive == 0) {
                return;
            }
            if self.warp.steps - begun > STUCK {
                let what = format!("the block has run {STUCK} instructions; does it wait for another block?");
                return self.warp.fail(FaultKind::Stuck, 0, None, what);
            }
            if !ran && !self.release_barrier() {
                return;
            }
        }
    }

    /// Releases the warps of a block once all of them wait at a barrier. Returns false after a fault.
    fn release_barrier(&mut self) -> bool {
        let mut waiting = self.states.iter().filter(|s| s.alive != 0).filter_map(|s| s.barrier);
        let first = waiting.next();
        if let Some(other) = waiting.find(|&b| Some(b) != first) {
            let what = format!("warps wait at different barriers: {} and {other}", first.unwrap_or(0));
            self.warp.fail(FaultKind::Barrier, 0, None, what);
            return false;
        }
        for state in &mut self.states {
            state.barrier = None;
        }
        if self.warp.run.shadows {
            self.warp.shadow.pass_barrier();
        }
        true
    }
}
