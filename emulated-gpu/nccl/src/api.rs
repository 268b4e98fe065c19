//! The C functions of `nccl.h`.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use tutti_emulated_exports::{Driver, Stream};

use crate::communicator::{Communicator, Mode};
use crate::group;
use crate::id::UniqueId;
use crate::operation::{Call, Operation, buffer_bytes};
use crate::rendezvous;
use crate::result::{Error, Outcome, code, describe};
use crate::value::{Kind, Reduction};

/// Version of the library: 2.28.3.
const VERSION: i32 = 22_803;
/// Magic number that `NCCL_CONFIG_INITIALIZER` stores in a configuration.
const CONFIG_MAGIC: u32 = 0xcafe_beef;

/// First fields of `ncclConfig_t`.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cluster_size: i32,
    least_blocks: i32,
    most_blocks: i32,
}

/// Value of a field that the program leaves unset (`NCCL_CONFIG_UNDEF_INT`).
const UNDEFINED: i32 = i32::MIN;

impl Config {
    /// True if NVIDIA's library accepts the values of these fields.
    fn is_valid(&self) -> bool {
        let positive = |number| number == UNDEFINED || number > 0;
        self.magic == CONFIG_MAGIC
            && self.size >= size_of::<Config>()
            && [UNDEFINED, 0, 1].contains(&self.blocking)
            && (self.cluster_size == UNDEFINED || self.cluster_size >= 0)
            && positive(self.least_blocks)
            && positive(self.most_blocks)
    }
}

/// Communicators by their handles. No two communicators of a process get the same handle.
static COMMUNICATORS: LazyLock<Mutex<HashMap<usize, Arc<Communicator>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicUsize = AtomicUsize::new(0x10_0000);

fn communicators() -> MutexGuard<'static, HashMap<usize, Arc<Communicator>>> {
    COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(handle: *mut c_void) -> Outcome<Arc<Communicator>> {
    communicators().get(&handle.addr()).cloned().ok_or(Error::INVALID_ARGUMENT)
}

fn remove(handle: *mut c_void) -> Outcome<Arc<Communicator>> {
    communicators().remove(&handle.addr()).ok_or(Error::INVALID_ARGUMENT)
}

/// Stores a result for a C caller.
///
/// # Safety
///
/// `target` is null or valid for a write.
unsafe fn put<T>(target: *mut T, value: T) -> Outcome {
    if target.is_null() {
        return Err(Error::INVALID_ARGUMENT);
    }
    // SAFETY: `target` is not null, so the caller promises that it is valid for a write.
    unsafe { target.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut i32) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(unsafe { put(version, VERSION) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(rendezvous::open().and_then(|made| unsafe { put(id, made) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: i32) -> *const c_char {
    describe(result).as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    c"reports of the emulated NCCL are on standard error".as_ptr()
}

/// Creates a communicator, stores its handle and starts to join the group.
///
/// # Safety
///
/// `handle` is null or valid for a write.
unsafe fn begin_join(
    handle: *mut *mut c_void,
    id: UniqueId,
    rank: i32,
    size: i32,
    mode: Mode,
) -> Outcome<Arc<Communicator>> {
    let driver = Driver::open().ok_or(Error::UNHANDLED_CUDA_ERROR)?;
    let of = driver.describe(Stream(std::ptr::null_mut())).map_err(|_| Error::UNHANDLED_CUDA_ERROR)?;
    let number = |value| usize::try_from(value).map_err(|_| Error::INVALID_ARGUMENT);
    let communicator = Communicator::join(driver, of, id, number(rank)?, number(size)?, mode)?;
    let made = NEXT.fetch_add(16, Ordering::Relaxed);
    // SAFETY: the caller promises that `handle` is null or valid for a write.
    unsafe { put(handle, std::ptr::without_provenance_mut(made)) }?;
    communicators().insert(made, communicator.clone());
    Ok(communicator)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    handle: *mut *mut c_void,
    size: i32,
    id: UniqueId,
    rank: i32,
) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(unsafe { begin_join(handle, id, rank, size, Mode::Blocking) }.and_then(group::add_joining))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    handle: *mut *mut c_void,
    size: i32,
    id: UniqueId,
    rank: i32,
    config: *const Config,
) -> i32 {
    // SAFETY: the program passes null or a pointer to a configuration.
    let mode = match unsafe { config.as_ref() } {
        Some(config) if !config.is_valid() => return Error::INVALID_ARGUMENT.0,
        Some(config) if config.blocking == 0 => Mode::NonBlocking,
        Some(_) | None => Mode::Blocking,
    };
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(unsafe { begin_join(handle, id, rank, size, mode) }.and_then(|communicator| match mode {
        Mode::Blocking => group::add_joining(communicator),
        Mode::NonBlocking => Err(Error::IN_PROGRESS),
    }))
}

/// Refuses to make the communicators of several devices in one process. In this library, a process joins with one
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(handles: *mut *mut c_void, count: i32, devices: *const i32) -> i32 {
    let _ = (handles, count, devices);
    eprintln!("emulated NCCL: one process joins with one device; ncclCommInitAll is not there");
    Error::INVALID_USAGE.0
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(handle: *mut c_void) -> i32 {
    code(find(handle).and_then(|communicator| communicator.check()))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(handle: *mut c_void) -> i32 {
    code(remove(handle).map(|communicator| communicator.finish()))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(handle: *mut c_void) -> i32 {
    code(remove(handle).map(|communicator| communicator.abort()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, error: *mut i32) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(
        find(handle)
            .and_then(|communicator| unsafe { put(error, communicator.error().map_or(0, |error| error.0)) }),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(handle: *mut c_void, count: *mut i32) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(find(handle).and_then(|communicator| unsafe { put(count, communicator.size as i32) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(handle: *mut c_void, rank: *mut i32) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(find(handle).and_then(|communicator| unsafe { put(rank, communicator.rank as i32) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(handle: *mut c_void, device: *mut i32) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    code(find(handle).and_then(|communicator| unsafe { put(device, communicator.of.ordinal as i32) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> i32 {
    group::start();
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> i32 {
    code(group::end())
}

/// Arguments of every operation.
struct Arguments {
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    kind: i32,
    handle: *mut c_void,
    stream: *mut c_void,
}

/// Checks an operation and enqueues it in its stream.
fn enqueue(name: &'static str, call: Call, reduction: i32, arguments: &Arguments) -> Outcome {
    let communicator = find(arguments.handle)?;
    communicator.check()?;
    let kind = Kind::of(arguments.kind).ok_or(Error::INVALID_ARGUMENT)?;
    let reduction = Reduction::of(reduction).ok_or(Error::INVALID_ARGUMENT)?;
    let (rank, size) = (communicator.rank, communicator.size);
    let other = match call {
        Call::Broadcast { root } | Call::Reduce { root } => root,
        Call::Send { peer } | Call::Receive { peer } => peer,
        _ => 0,
    };
    if other >= size || arguments.count.checked_mul(kind.bytes() * size).is_none() {
        return Err(Error::INVALID_ARGUMENT);
    }
    let stream = Stream(arguments.stream);
    let of = communicator.driver.describe(stream).map_err(|_| Error::UNHANDLED_CUDA_ERROR)?;
    let (source, target) = (arguments.source.addr() as u64, arguments.target.addr() as u64);
    let (source_bytes, target_bytes) = buffer_bytes(call, arguments.count, kind, rank, size);
    let held = |address, bytes| bytes == 0 || communicator.driver.holds(of, address, bytes as u64);
    if of.device != communicator.of.device || !held(source, source_bytes) || !held(target, target_bytes) {
        return Err(Error::INVALID_ARGUMENT);
    }
    let number = match call {
        Call::Send { peer } => communicator.next_send(peer),
        Call::Receive { peer } => communicator.next_receive(peer),
        _ => communicator.next_collective(),
    };
    let count = arguments.count;
    group::add(
        stream,
        Operation { communicator, of, call, name, source, target, count, kind, reduction, number },
    )
}

/// Converts a rank to an index. A negative rank becomes `usize::MAX`, which no group has.
fn index(rank: i32) -> usize {
    usize::try_from(rank).unwrap_or(usize::MAX)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    kind: i32,
    reduction: i32,
    handle: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    let arguments = Arguments { source, target, count, kind, handle, stream };
    code(enqueue("ncclAllReduce", Call::AllReduce, reduction, &arguments))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    kind: i32,
    reduction: i32,
    handle: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    let arguments = Arguments { source, target, count, kind, handle, stream };
    code(enqueue("ncclReduceScatter", Call::ReduceScatter, reduction, &arguments))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    kind: i32,
    reduction: i32,
    root: i32,
    handle: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    let arguments = Arguments { source, target, count, kind, handle, stream };
    code(enqueue("ncclReduce", Call::Reduce { root: index(root) }, reduction, &arguments))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    kind: i32,
    handle: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    code(enqueue(
        "ncclAllGather",
        Call::AllGather,
        0,
        &Arguments { source, target, count, kind, handle, stream },
    ))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    source: *const c_void,
    target: *mut c_void,
    count: usize,
    kind: i32,
    root: i32,
    handle: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    let arguments = Arguments { source, target, count, kind, handle, stream };
    code(enqueue("ncclBroadcast", Call::Broadcast { root: index(root) }, 0, &arguments))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    source: *const c_void,
    count: usize,
    kind: i32,
    peer: i32,
    handle: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    let arguments = Arguments { source, target: std::ptr::null_mut(), count, kind, handle, stream };
    code(enqueue("ncclSend", Call::Send { peer: index(peer) }, 0, &arguments))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    target: *mut c_void,
    count: usize,
    kind: i32,
    peer: i32,
    handle: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    let arguments = Arguments { source: std::ptr::null(), target, count, kind, handle, stream };
    code(enqueue("ncclRecv", Call::Receive { peer: index(peer) }, 0, &arguments))
}
