//! Tests `libnccl` between processes, through the unmodified cudarc.
#![allow(clippy::unwrap_used)]

mod fixture;

use std::path::Path;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits, sys as driver,
};
use cudarc::nccl::{Comm, Id, NcclType, ReduceOp, group_end, group_start, result, sys};
use half::bf16;
use sys::ncclResult_t as Code;
use tutti_emulated_programs::{Ended, Gpus, Process};

/// A bfloat16 in device memory. cudarc's feature for this type is off, because only tests would need it. The feature
/// would make test builds recompile every package that depends on cudarc.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(transparent)]
struct Half(bf16);

// SAFETY: a `Half` is one 16-bit number without padding.
unsafe impl DeviceRepr for Half {}
// SAFETY: 16 zero bits are the bf16 number zero.
unsafe impl ValidAsZeroBits for Half {}

impl NcclType for Half {
    fn as_nccl_type() -> sys::ncclDataType_t {
        sys::ncclDataType_t::ncclBfloat16
    }
}

/// Returns the id of a group. Rank 0 makes the id and writes it to a file in the folder. The other ranks read the file.
fn id(folder: &Path, name: &str, rank: usize) -> Id {
    let (file, unfinished) = (folder.join(name), folder.join(format!("{name}.new")));
    if rank == 0 {
        let id = Id::new().unwrap();
        let bytes: Vec<u8> = id.internal().iter().map(|&byte| byte as u8).collect();
        std::fs::write(&unfinished, bytes).unwrap();
        std::fs::rename(unfinished, file).unwrap();
        return id;
    }
    loop {
        if let Ok(bytes) = std::fs::read(&file) {
            let bytes: Vec<std::ffi::c_char> =
                bytes.into_iter().map(|byte| byte as std::ffi::c_char).collect();
            return Id::uninit(bytes.try_into().unwrap());
        }
        std::thread::yield_now();
    }
}

/// Creates a stream on the rank's device.
fn stream(process: &Process) -> Arc<CudaStream> {
    CudaContext::new(process.rank).unwrap().new_stream().unwrap()
}

fn raw_id(id: Id) -> sys::ncclUniqueId {
    sys::ncclUniqueId { internal: *id.internal() }
}

/// A communicator as a raw handle instead of cudarc's `Comm`, so that a test can abort it and query its errors.
struct Raw {
    handle: sys::ncclComm_t,
    stream: Arc<CudaStream>,
}

impl Raw {
    fn join(process: &Process, size: usize, name: &str) -> Self {
        let stream = stream(process);
        let id = raw_id(id(&process.folder, name, process.rank));
        let mut handle = std::ptr::null_mut();
        // SAFETY: the result is valid for a write.
        unsafe { result::comm_init_rank(&mut handle, size as i32, id, process.rank as i32) }.unwrap();
        Raw { handle, stream }
    }

    /// Enqueues an all-reduce of the buffer in the stream.
    fn all_reduce(&self, buffer: &CudaSlice<f32>) -> Code {
        let address = std::ptr::without_provenance_mut(buffer.device_ptr(&self.stream).0 as usize);
        let (kind, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        let stream = self.stream.cu_stream().cast();
        // SAFETY: the buffer lives until the test ends.
        unsafe { sys::ncclAllReduce(address, address, buffer.len(), kind, sum, self.handle, stream) }
    }

    fn error(&self) -> Code {
        let mut error = Code::ncclSuccess;
        // SAFETY: the communicator is not destroyed, and the result is valid for a write.
        assert_eq!(unsafe { sys::ncclCommGetAsyncError(self.handle, &mut error) }, Code::ncclSuccess);
        error
    }

    fn wait_for_error(&self) -> Code {
        loop {
            match self.error() {
                Code::ncclSuccess | Code::ncclInProgress => std::thread::yield_now(),
                error => return error,
            }
        }
    }

    fn is_idle(&self) -> bool {
        // SAFETY: `self.stream` keeps the stream alive.
        match unsafe { driver::cuStreamQuery(self.stream.cu_stream()) } {
            driver::CUresult::CUDA_SUCCESS => true,
            driver::CUresult::CUDA_ERROR_NOT_READY => false,
            other => panic!("{other:?}"),
        }
    }

    fn abort(self) {
        // SAFETY: the communicator is not used after this.
        unsafe { result::comm_abort(self.handle) }.unwrap();
        // The abort ends the operation, and the stream continues.
        self.stream.synchronize().unwrap();
    }
}

/// Fails unless all processes ended well.
fn all_well(ended: &[Ended]) {
    for (rank, ended) in ended.iter().enumerate() {
        assert!(ended.well, "rank {rank} failed:\n{}", ended.text);
    }
}

/// Runs every collective once, on values that encode the rank and the element's index.
fn collectives(process: &Process, size: usize) {
    let rank = process.rank;
    let stream = stream(process);
    let comm = Comm::from_rank(stream.clone(), rank, size, id(&process.folder, "id", rank)).unwrap();
    let n = 70_000;
    let value = |rank: usize, i: usize| (rank * 100 + i % 90) as f32;
    let own: Vec<f32> = (0..n).map(|i| value(rank, i)).collect();
    let source = stream.clone_htod(&own).unwrap();
    let all = |i: usize| (0..size).map(|rank| value(rank, i)).sum::<f32>();

    let mut sums = stream.alloc_zeros::<f32>(n).unwrap();
    comm.all_reduce(&source, &mut sums, &ReduceOp::Sum).unwrap();
    // Operations run in the order of the stream, so the second reduction reads the result of the first.
    comm.all_reduce_in_place(&mut sums, &ReduceOp::Max).unwrap();
    let sums = stream.clone_dtoh(&sums).unwrap();
    assert!(sums.iter().enumerate().all(|(i, sum)| *sum == all(i)));

    let mut gathered = stream.alloc_zeros::<f32>(n * size).unwrap();
    comm.all_gather(&source, &mut gathered).unwrap();
    let gathered = stream.clone_dtoh(&gathered).unwrap();
    assert!(gathered.iter().enumerate().all(|(i, x)| *x == value(i / n, i % n)));

    let mut scattered = stream.alloc_zeros::<f32>(n / size).unwrap();
    comm.reduce_scatter(&source, &mut scattered, &ReduceOp::Sum).unwrap();
    let scattered = stream.clone_dtoh(&scattered).unwrap();
    assert!(scattered.iter().enumerate().all(|(i, x)| *x == all(rank * (n / size) + i)));

    let root = size - 1;
    let mut received = stream.alloc_zeros::<f32>(n).unwrap();
    comm.broadcast((rank == root).then_some(&source), &mut received, root as i32).unwrap();
    let received = stream.clone_dtoh(&received).unwrap();
    assert!(received.iter().enumerate().all(|(i, x)| *x == value(root, i)));

    // A ring: each rank sends to the next one and receives from the previous one. Both calls are in one group, so the
    // send does not block the receive.
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut received = stream.alloc_zeros::<f32>(n).unwrap();
    group_start().unwrap();
    comm.recv(&mut received, previous as i32).unwrap();
    comm.send(&source, next as i32).unwrap();
    group_end().unwrap();
    let received = stream.clone_dtoh(&received).unwrap();
    assert!(received.iter().enumerate().all(|(i, x)| *x == value(previous, i)));

    // The sum is rounded to bf16 after each rank, in the order of ranks, so that every rank gets the same bits.
    let number = |x| Half(bf16::from_f32(x));
    let half = stream.clone_htod(&[number(if rank == 0 { 256.0 } else { 1.0 }); 3]).unwrap();
    let mut halves = stream.alloc_zeros::<Half>(3).unwrap();
    comm.all_reduce(&half, &mut halves, &ReduceOp::Sum).unwrap();
    assert_eq!(stream.clone_dtoh(&halves).unwrap(), [number(256.0); 3]);
}

#[test]
fn two_ranks_agree_in_every_collective() {
    let gpus = Gpus::new(2);
    all_well(&gpus.processes("two_ranks_agree_in_every_collective", 2, |process| collectives(process, 2)));
}

#[test]
fn four_ranks_agree_with_late_streams_too() {
    let gpus = Gpus::new(4).with("EMULATED_GPU_SEED", 11);
    all_well(&gpus.processes("four_ranks_agree_with_late_streams_too", 4, |process| collectives(process, 4)));
}

#[test]
fn the_death_of_a_rank_is_an_error_of_the_others_and_they_join_again() {
    let test = "the_death_of_a_rank_is_an_error_of_the_others_and_they_join_again";
    let ended = Gpus::new(4).processes(test, 4, |process| {
        let comm = Raw::join(process, 4, "first");
        let buffer = comm.stream.clone_htod(&[1.0_f32; 64]).unwrap();
        assert_eq!(comm.all_reduce(&buffer), Code::ncclSuccess);
        assert_eq!(comm.stream.clone_dtoh(&buffer).unwrap(), [4.0; 64]);
        if process.rank == 3 {
            std::process::abort();
        }
        // The dead rank's socket may close before or after the other ranks begin the operation.
        let begun = comm.all_reduce(&buffer);
        assert_eq!(comm.wait_for_error(), Code::ncclRemoteError);
        if begun == Code::ncclSuccess {
            assert!(!comm.is_idle(), "an operation that a rank did not join ended");
        }
        assert_eq!(comm.all_reduce(&buffer), Code::ncclRemoteError);
        comm.abort();
        let comm = Raw::join(process, 3, "second");
        let buffer = comm.stream.clone_htod(&[1.0_f32; 64]).unwrap();
        assert_eq!(comm.all_reduce(&buffer), Code::ncclSuccess);
        assert_eq!(comm.stream.clone_dtoh(&buffer).unwrap(), [3.0; 64]);
        // SAFETY: the communicator is not used after this.
        unsafe { result::comm_destroy(comm.handle) }.unwrap();
    });
    assert!(!ended[3].well);
    all_well(&ended[..3]);
}

#[test]
fn a_rank_that_never_joins_a_collective_is_a_hang_until_the_abort() {
    let test = "a_rank_that_never_joins_a_collective_is_a_hang_until_the_abort";
    let gpus = Gpus::new(2).with("EMULATED_GPU_FAULTS", "never-joins kernel=ncclAllReduce device=1 at=2");
    let ended = gpus.processes(test, 2, |process| {
        let comm = Raw::join(process, 2, "id");
        let buffer = comm.stream.clone_htod(&[1.0_f32; 64]).unwrap();
        assert_eq!(comm.all_reduce(&buffer), Code::ncclSuccess);
        comm.stream.synchronize().unwrap();
        assert_eq!(comm.all_reduce(&buffer), Code::ncclSuccess);
        let file = |rank| process.folder.join(format!("asked-{rank}"));
        let asked = std::time::Instant::now();
        while asked.elapsed() < std::time::Duration::from_millis(100) {
            assert!(!comm.is_idle(), "a collective that a rank did not join ended");
            assert_eq!(comm.error(), Code::ncclSuccess);
        }
        // Both ranks finish their checks before either aborts, because an abort causes an error on the other rank.
        std::fs::write(file(process.rank), "").unwrap();
        while !file(1 - process.rank).exists() {
            std::thread::yield_now();
        }
        comm.abort();
    });
    all_well(&ended);
    assert!(ended[1].text.contains("never joins ncclAllReduce"), "{}", ended[1].text);
}

#[test]
fn joining_without_waiting_ends_when_the_last_rank_comes_or_with_an_abort() {
    let test = "joining_without_waiting_ends_when_the_last_rank_comes_or_with_an_abort";
    let ended = Gpus::new(2).processes(test, 2, |process| {
        let rank = process.rank;
        let join = |name: &str| {
            let stream = stream(process);
            let id = raw_id(id(&process.folder, name, rank));
            let mut handle = std::ptr::null_mut();
            // SAFETY: all zeros are a valid value of this type. The next statement sets the first fields.
            let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
            (config.size, config.magic, config.blocking) = (size_of::<sys::ncclConfig_t>(), 0xcafe_beef, 0);
            // SAFETY: `handle` is valid for a write, and `config` is initialised. NCCL does not treat 0 as unset, and
            // refuses 0 thread blocks.
            let refused =
                unsafe { sys::ncclCommInitRankConfig(&mut handle, 2, id, rank as i32, &mut config) };
            assert_eq!(refused, Code::ncclInvalidArgument);
            (config.cgaClusterSize, config.minCTAs, config.maxCTAs) = (i32::MIN, i32::MIN, i32::MIN);
            // SAFETY: `handle` is valid for a write, and `config` is initialised.
            let begun = unsafe { sys::ncclCommInitRankConfig(&mut handle, 2, id, rank as i32, &mut config) };
            assert_eq!(begun, Code::ncclInProgress);
            Raw { handle, stream }
        };
        if rank == 0 {
            let alone = join("alone");
            assert_eq!(alone.error(), Code::ncclInProgress);
            alone.abort();
        }
        let comm = join("both");
        while comm.error() == Code::ncclInProgress {
            std::thread::yield_now();
        }
        assert_eq!(comm.error(), Code::ncclSuccess);
        let buffer = comm.stream.clone_htod(&[2.0_f32; 8]).unwrap();
        assert_eq!(comm.all_reduce(&buffer), Code::ncclInProgress);
        assert_eq!(comm.all_reduce(&buffer), Code::ncclInvalidArgument, "one call at a time");
        while comm.error() == Code::ncclInProgress {
            std::thread::yield_now();
        }
        assert_eq!(comm.stream.clone_dtoh(&buffer).unwrap(), [4.0; 8]);
        // SAFETY: the communicator is not used after this.
        unsafe { result::comm_destroy(comm.handle) }.unwrap();
    });
    all_well(&ended);
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let ended = Gpus::new(1).processes("two_ranks_on_one_device_are_refused", 2, |process| {
        let _stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let (rank, id) = (process.rank as i32, raw_id(id(&process.folder, "id", process.rank)));
        let mut handle = std::ptr::null_mut();
        // SAFETY: the result is valid for a write.
        let joined = unsafe { sys::ncclCommInitRank(&mut handle, 2, id, rank) };
        assert_eq!(joined, Code::ncclInvalidUsage);
    });
    all_well(&ended);
}

#[test]
fn ranks_that_disagree_are_found() {
    let ended = Gpus::new(2).processes("ranks_that_disagree_are_found", 2, |process| {
        let comm = Raw::join(process, 2, "id");
        let buffer = comm.stream.clone_htod(&vec![1.0_f32; 8 + process.rank]).unwrap();
        assert_eq!(comm.all_reduce(&buffer), Code::ncclSuccess);
        let error = comm.wait_for_error();
        assert!([Code::ncclInvalidUsage, Code::ncclRemoteError].contains(&error), "{error:?}");
        comm.abort();
    });
    all_well(&ended);
    assert!(ended.iter().any(|ended| ended.text.contains("or with other arguments")), "{ended:?}");
}

#[test]
fn wrong_arguments_are_refused() {
    Gpus::new(1).run("wrong_arguments_are_refused", |process| {
        let comm = Raw::join(process, 1, "id");
        let host = [0.0_f32; 8];
        let (kind, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        let buffer = comm.stream.clone_htod(&host).unwrap();
        let address = std::ptr::without_provenance_mut(buffer.device_ptr(&comm.stream).0 as usize);
        let host = host.as_ptr().cast::<std::ffi::c_void>();
        let stream = comm.stream.cu_stream().cast();
        // SAFETY: the library refuses each wrong argument before it accesses a buffer.
        unsafe {
            let from_host = sys::ncclAllReduce(host, address, 8, kind, sum, comm.handle, stream);
            let too_long = sys::ncclAllReduce(address, address, 9, kind, sum, comm.handle, stream);
            let no_peer = sys::ncclSend(address, 8, kind, 1, comm.handle, stream);
            assert_eq!([from_host, too_long, no_peer], [Code::ncclInvalidArgument; 3]);
            result::comm_abort(comm.handle).unwrap();
            assert_eq!(sys::ncclCommAbort(comm.handle), Code::ncclInvalidArgument, "a handle that is gone");
        }
    });
}
