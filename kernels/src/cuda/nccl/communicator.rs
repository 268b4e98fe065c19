//! One rank's communicator: joining, collectives, and abort.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::nccl::sys;

use super::GroupMeeting;
use super::in_flight::InFlight;
use super::library::{IN_PROGRESS, INVALID_USAGE, Nccl, SUCCESS, open};
use crate::DeviceError;
use crate::collective::{CollectiveError, GroupRank, Operation};
use crate::cuda::context::Gpu;
use crate::cuda::memory::DevicePointer;

/// Value of the field `magic` of every configuration (`NCCL_API_MAGIC`).
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// Version of the configuration's layout: NCCL 2.30. An older library reads the fields that it knows.
const CONFIG_VERSION: u32 = 23_000;
/// Value of a configuration field that leaves the choice to NCCL (`NCCL_CONFIG_UNDEF_INT`).
const UNDEFINED: c_int = c_int::MIN;
/// Time for which the host polls a nonblocking call of NCCL before it sleeps between polls. Most calls end within this
/// time: once the ranks are connected, NCCL's own thread takes some microseconds to launch a collective.
const SPIN: Duration = Duration::from_micros(200);
/// Interval of polls after [`SPIN`].
const POLL: Duration = Duration::from_micros(100);
/// Minimum interval between two checks of the collectives in flight.
const LOOK: Duration = Duration::from_millis(1);

/// An elementwise reduction over all ranks, in place.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) enum Reduction {
    /// Sum of f32.
    Sum,
    /// Maximum of u32 keys.
    LargestKey,
}

/// One rank's endpoint of a group. An error aborts the endpoint, and every later call returns the same error.
pub(in crate::cuda) struct Communicator {
    nccl: &'static Nccl,
    /// Null once the communicator is aborted, because the abort frees it.
    handle: sys::ncclComm_t,
    gpu: Arc<Gpu>,
    group_rank: GroupRank,
    deadline: Duration,
    in_flight: InFlight,
    looked: Instant,
    failed: Option<DeviceError>,
}

// SAFETY: a communicator may be used by one thread at a time, which binds its GPU's context.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins a group, together with all its other ranks.
    pub(in crate::cuda) fn join(gpu: &Arc<Gpu>, meeting: &GroupMeeting) -> Result<Self, DeviceError> {
        let GroupMeeting { id, group_rank, patience, deadline } = *meeting;
        gpu.bind()?;
        let nccl = open().map_err(|missing| DeviceError::Unsupported(missing.to_string()))?;
        let mut own = Self {
            nccl,
            handle: std::ptr::null_mut(),
            gpu: gpu.clone(),
            group_rank,
            deadline,
            in_flight: InFlight::new(gpu),
            looked: Instant::now(),
            failed: None,
        };
        let (rank, size) = (group_rank.rank as c_int, group_rank.world_size as c_int);
        let mut config = not_blocking();
        // SAFETY: the pointers are valid for a handle and a configuration, and the GPU's context is bound.
        let begun =
            unsafe { (nccl.ncclCommInitRankConfig)(&mut own.handle, size, id.for_nccl(), rank, &mut config) };
        own.settle(Operation::Forming, begun, patience)?;
        Ok(own)
    }

    /// This rank and the size of its group.
    pub(in crate::cuda) fn group_rank(&self) -> GroupRank {
        self.group_rank
    }

    /// Enqueues a reduction of the `count` elements at `at`, in place.
    pub(in crate::cuda) fn all_reduce(
        &mut self,
        at: DevicePointer<f32>,
        count: usize,
        reduction: Reduction,
    ) -> Result<(), DeviceError> {
        self.begin()?;
        let (kind, reduction) = match reduction {
            Reduction::Sum => (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum),
            Reduction::LargestKey => (sys::ncclDataType_t::ncclUint32, sys::ncclRedOp_t::ncclMax),
        };
        let (data, stream) = (pointer(at), self.gpu.stream.cast());
        // SAFETY: the callers pass buffers of `count` elements, which live until the stream has passed the collective.
        let begun = unsafe {
            (self.nccl.ncclAllReduce)(data, data, count, kind as u32, reduction as u32, self.handle, stream)
        };
        self.end(Operation::AllReduce, begun)
    }

    /// Enqueues a gather of `count` floats from each rank. Rank 0 passes `all`, `[ranks, count]`, which receives the
    /// parts of all other ranks. The other ranks pass their `part`.
    pub(in crate::cuda) fn gather(
        &mut self,
        part: DevicePointer<f32>,
        all: Option<DevicePointer<f32>>,
        count: usize,
    ) -> Result<(), DeviceError> {
        self.begin()?;
        let (nccl, handle, stream) = (self.nccl, self.handle, self.gpu.stream.cast());
        let kind = sys::ncclDataType_t::ncclFloat32 as u32;
        // SAFETY: the callers pass buffers of these sizes, which live until the stream has passed the collective. Each
        // `ncclGroupStart` is followed by an `ncclGroupEnd`, even after an error.
        let begun = unsafe {
            let mut begun = (nccl.ncclGroupStart)();
            match all {
                Some(all) => {
                    for rank in 1..self.group_rank.world_size {
                        let to = pointer(all.add(rank * count));
                        let code = (nccl.ncclRecv)(to, count, kind, rank as c_int, handle, stream);
                        begun = worse(begun, code);
                    }
                }
                None => begun = worse(begun, (nccl.ncclSend)(pointer(part), count, kind, 0, handle, stream)),
            }
            worse(begun, (nccl.ncclGroupEnd)())
        };
        self.end(Operation::Gather, begun)
    }

    /// Checks the collectives in flight, unless the last check was less than `LOOK` ago. Aborts the communicator if
    /// NCCL has met an error, or if a collective is overdue.
    pub(in crate::cuda) fn check(&mut self) -> Result<(), DeviceError> {
        if self.failed.is_none() && self.looked.elapsed() < LOOK {
            return Ok(());
        }
        self.look().map(|_| ())
    }

    /// Waits until the stream has passed all collectives. A later wait for the stream is then bounded.
    pub(in crate::cuda) fn wait(&mut self) -> Result<(), DeviceError> {
        while self.look()?.is_some() {
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Does the same as [`check`](Self::check), even if the last check is recent. Returns the first collective that the
    /// stream has not passed.
    pub(in crate::cuda) fn look(&mut self) -> Result<Option<Operation>, DeviceError> {
        self.begin()?;
        self.looked = Instant::now();
        match self.asynchronous_error() {
            SUCCESS | IN_PROGRESS => {}
            code => return Err(self.fail_with(Operation::AllReduce, code)),
        }
        match self.in_flight.next()? {
            Some((operation, due)) if due >= self.deadline => Err(self.unfinished(operation, self.deadline)),
            next => Ok(next.map(|(operation, _)| operation)),
        }
    }

    /// Returns the first error, if there was one.
    fn begin(&self) -> Result<(), DeviceError> {
        match &self.failed {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Waits until NCCL has enqueued a collective, and adds it to those in flight.
    fn end(&mut self, operation: Operation, begun: u32) -> Result<(), DeviceError> {
        self.settle(operation, begun, self.deadline)?;
        self.in_flight.mark(operation)
    }

    /// Waits until a call has ended. The communicator is non-blocking, so a call may continue in the background, and no
    /// other call may begin before its end.
    fn settle(&mut self, operation: Operation, begun: u32, limit: Duration) -> Result<(), DeviceError> {
        let (mut code, since) = (begun, Instant::now());
        while code == IN_PROGRESS {
            let waited = since.elapsed();
            if waited >= limit {
                return Err(self.unfinished(operation, limit));
            }
            if waited < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep(POLL);
            }
            code = self.asynchronous_error();
        }
        if code == SUCCESS { Ok(()) } else { Err(self.fail_with(operation, code)) }
    }

    /// Returns the communicator's state: success, in progress, or an asynchronous error.
    fn asynchronous_error(&self) -> u32 {
        let mut state = SUCCESS;
        // SAFETY: the communicator is live, and the pointer is valid for a result.
        match unsafe { (self.nccl.ncclCommGetAsyncError)(self.handle, &mut state) } {
            SUCCESS => state,
            code => code,
        }
    }

    fn unfinished(&mut self, operation: Operation, limit: Duration) -> DeviceError {
        let GroupRank { rank, world_size: size } = self.group_rank;
        self.fail(CollectiveError::Unfinished { rank, size, operation, limit })
    }

    fn fail_with(&mut self, operation: Operation, code: u32) -> DeviceError {
        let GroupRank { rank, world_size } = self.group_rank;
        let handle = (!self.handle.is_null()).then_some(self.handle);
        let why =
            format!("NCCL, rank {rank} of {world_size}, {operation}: {}", self.nccl.describe(code, handle));
        match (operation, code) {
            (Operation::Forming, INVALID_USAGE) => {
                self.fail(DeviceError::Unsupported(format!("{why}. Each rank needs a GPU of its own")))
            }
            _ => self.fail(CollectiveError::Transport(why)),
        }
    }

    /// Aborts the communicator, and keeps the error for all later calls.
    fn fail(&mut self, error: impl Into<DeviceError>) -> DeviceError {
        self.abort();
        let error = error.into();
        self.failed = Some(error.clone());
        error
    }

    /// Stops the collectives in flight, so that the stream continues, and frees the communicator.
    fn abort(&mut self) {
        let handle = std::mem::replace(&mut self.handle, std::ptr::null_mut());
        if !handle.is_null() && self.gpu.bind().is_ok() {
            // SAFETY: nothing uses the handle any more. An error is ignored, because there is nothing left to do.
            unsafe {
                (self.nccl.ncclCommAbort)(handle);
            }
        }
    }
}

impl Drop for Communicator {
    /// Aborts the communicator instead of destroying it, because a destruction waits for the other ranks, which may be
    /// gone.
    fn drop(&mut self) {
        self.abort();
    }
}

/// Returns the worse of two results. An error is worse than `IN_PROGRESS`, which is worse than success. Of two errors,
/// the first one counts.
fn worse(first: u32, second: u32) -> u32 {
    match first {
        SUCCESS => second,
        IN_PROGRESS if second != SUCCESS => second,
        first => first,
    }
}

fn pointer(at: DevicePointer<f32>) -> *mut c_void {
    std::ptr::without_provenance_mut(at.address() as usize)
}

/// Returns NCCL's default configuration, except that calls do not block.
fn not_blocking() -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}
