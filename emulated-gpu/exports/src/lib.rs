//! Functions of the emulated `libcuda.so.1` for `libcublasLt` and `libnccl`: work in a stream, and access to device
//! memory.
//!
//! The driver exports one symbol for these libraries, [`SYMBOL`]: a table of C functions. The libraries open
//! `libcuda.so.1` by name, as NVIDIA's libraries do, and so find the driver that the program uses.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// Name of the symbol of the table of driver functions.
pub const SYMBOL: &CStr = c"tutti_emulated_driver_table";
/// Version of the table's layout.
pub const VERSION: u32 = 1;

/// Work that a library enqueues in a stream. The driver calls this function once: with `run` true to run the work, or
/// with `run` false to drop the work. The result is a `CUresult`.
pub type RawWork = unsafe extern "C" fn(state: *mut c_void, run: bool) -> c_int;

/// Functions of the driver. Each returns a `CUresult` unless its comment says otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DriverTable {
    /// [`VERSION`] of the library that made the table.
    pub version: u32,
    /// Stores the context and the device of a stream; null means the current context's default stream.
    pub describe: unsafe extern "C" fn(stream: *mut c_void, of: *mut StreamContext) -> c_int,
    /// Enqueues work in a stream. Work that may wait for other processes must be `blocking`. On an error, drops the
    /// work.
    pub submit:
        unsafe extern "C" fn(stream: *mut c_void, blocking: bool, work: RawWork, state: *mut c_void) -> c_int,
    /// Returns true if a range lies in a single allocation of a context.
    pub holds: extern "C" fn(context: *mut c_void, address: u64, bytes: u64) -> bool,
    /// Returns the host address of a range that computing work is about to read. Returns null after it has reported a
    /// bad range.
    pub readable:
        extern "C" fn(context: *mut c_void, address: u64, bytes: u64, by: *const c_char) -> *const u8,
    /// Returns the host address of a range that computing work is about to write in full. Returns null after it has
    /// reported a bad range.
    pub writable: extern "C" fn(context: *mut c_void, address: u64, bytes: u64, by: *const c_char) -> *mut u8,
    /// Copies device memory to the host. Only blocking work may call this function.
    pub copy_out:
        unsafe extern "C" fn(context: *mut c_void, target: *mut u8, source: u64, bytes: u64) -> c_int,
    /// Copies host memory to the device. Only blocking work may call this function.
    pub copy_in:
        unsafe extern "C" fn(context: *mut c_void, target: u64, source: *const u8, bytes: u64) -> c_int,
    /// Returns true if a fault on demand keeps the device from joining the call `name`.
    pub never_joins: unsafe extern "C" fn(device: u32, name: *const c_char) -> bool,
}

/// Handle of a stream: a number that the driver looks up. Null means the current context's default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub *mut c_void);

// SAFETY: the handle is a number that is never dereferenced.
unsafe impl Send for Stream {}

/// Context of a stream.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamContext {
    /// Handle of the context.
    pub context: *mut c_void,
    /// Index of the device among all devices of the machine.
    pub device: u32,
    /// Index of the device among the devices that the process sees.
    pub ordinal: u32,
}

// SAFETY: the handle is a number that is never dereferenced.
unsafe impl Send for StreamContext {}
// SAFETY: the handle is a number that is never dereferenced.
unsafe impl Sync for StreamContext {}

/// A `CUresult` that is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError(pub c_int);

/// Error of work that failed for a reason other than a bad address (`CUDA_ERROR_LAUNCH_FAILED`).
pub const LAUNCH_FAILED: DriverError = DriverError(719);
/// Error of work that accessed a bad device address (`CUDA_ERROR_ILLEGAL_ADDRESS`).
pub const ILLEGAL_ADDRESS: DriverError = DriverError(700);

/// Work of a stream. An error that it returns becomes the context's sticky error.
pub type Work = Box<dyn FnOnce() -> Result<(), DriverError> + Send>;

/// States whether work may wait for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// Runs while no other computing work of the device runs.
    Computing,
    /// Runs in parallel with the work of other streams, and may wait for other processes.
    Blocking,
}

/// The emulated driver of this process.
#[derive(Clone, Copy)]
pub struct Driver(&'static DriverTable);

fn result(code: c_int) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError(code)) }
}

unsafe extern "C" fn call(state: *mut c_void, run: bool) -> c_int {
    // SAFETY: `Driver::submit` made the state, and the driver passes the state once.
    let work = unsafe { Box::from_raw(state.cast::<Work>()) };
    if !run {
        return 0;
    }
    work().err().map_or(0, |error| error.0)
}

impl Driver {
    /// Opens the driver. Returns none if `libcuda.so.1` is missing or is not the emulated driver.
    pub fn open() -> Option<Driver> {
        static TABLE: OnceLock<Option<Driver>> = OnceLock::new();
        *TABLE.get_or_init(find)
    }

    /// Returns the context of a stream.
    ///
    /// # Errors
    ///
    /// The driver's error for a wrong stream or a missing context.
    pub fn describe(&self, stream: Stream) -> Result<StreamContext, DriverError> {
        let mut of = StreamContext { context: std::ptr::null_mut(), device: 0, ordinal: 0 };
        // SAFETY: `of` is valid for a write.
        result(unsafe { (self.0.describe)(stream.0, &raw mut of) })?;
        Ok(of)
    }

    /// Enqueues work in a stream.
    ///
    /// # Errors
    ///
    /// The context's sticky error, or the error of a wrong stream. On an error the work is dropped.
    pub fn submit(&self, stream: Stream, kind: WorkKind, work: Work) -> Result<(), DriverError> {
        let state = Box::into_raw(Box::new(work));
        // SAFETY: `call` takes the state back exactly once.
        result(unsafe { (self.0.submit)(stream.0, kind == WorkKind::Blocking, call, state.cast()) })
    }

    /// True if a range lies in one allocation of a context.
    pub fn holds(&self, of: StreamContext, address: u64, bytes: u64) -> bool {
        (self.0.holds)(of.context, address, bytes)
    }

    /// Returns the bytes of a range that computing work reads. The driver reports a range that does not lie in one
    /// allocation. With the check `uninitialised` it also reports a range with bytes that were never written. `by`
    /// names the reader in reports.
    ///
    /// # Errors
    ///
    /// [`ILLEGAL_ADDRESS`] for a range that the driver reports.
    ///
    /// # Safety
    ///
    /// The slice is used only inside the work, and nothing writes to the range meanwhile.
    pub unsafe fn readable<'a>(
        &self,
        of: StreamContext,
        address: u64,
        bytes: u64,
        by: &CStr,
    ) -> Result<&'a [u8], DriverError> {
        let start = (self.0.readable)(of.context, address, bytes, by.as_ptr());
        if start.is_null() {
            return Err(ILLEGAL_ADDRESS);
        }
        // SAFETY: the driver returned the start of a range of `bytes` bytes. The range is not freed before the work
        // ends.
        Ok(unsafe { std::slice::from_raw_parts(start, bytes as usize) })
    }

    /// Returns the bytes of a range that computing work writes in full.
    ///
    /// # Errors
    ///
    /// [`ILLEGAL_ADDRESS`] for a range that is not in one allocation.
    ///
    /// # Safety
    ///
    /// The slice is used only inside the work, and nothing else uses the range meanwhile.
    pub unsafe fn writable<'a>(
        &self,
        of: StreamContext,
        address: u64,
        bytes: u64,
        by: &CStr,
    ) -> Result<&'a mut [u8], DriverError> {
        let start = (self.0.writable)(of.context, address, bytes, by.as_ptr());
        if start.is_null() {
            return Err(ILLEGAL_ADDRESS);
        }
        // SAFETY: the driver returned the start of a range of `bytes` bytes. The range is not freed before the work
        // ends.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, bytes as usize) })
    }

    /// Copies from device memory.
    ///
    /// # Errors
    ///
    /// The driver's error for a range that is not in one allocation.
    pub fn copy_out(&self, of: StreamContext, target: &mut [u8], source: u64) -> Result<(), DriverError> {
        // SAFETY: the target has as many bytes as are copied.
        result(unsafe { (self.0.copy_out)(of.context, target.as_mut_ptr(), source, target.len() as u64) })
    }

    /// Copies to device memory.
    ///
    /// # Errors
    ///
    /// The driver's error for a range that is not in one allocation.
    pub fn copy_in(&self, of: StreamContext, target: u64, source: &[u8]) -> Result<(), DriverError> {
        // SAFETY: the source has as many bytes as are copied.
        result(unsafe { (self.0.copy_in)(of.context, target, source.as_ptr(), source.len() as u64) })
    }

    /// True if a fault on demand keeps the device from joining the call `name`.
    pub fn never_joins(&self, device: u32, name: &str) -> bool {
        let Ok(name) = CString::new(name) else { return false };
        // SAFETY: the name ends with a zero byte.
        unsafe { (self.0.never_joins)(device, name.as_ptr()) }
    }
}

// Functions of the dynamic loader, which the standard library links anyway.
unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, symbol: *const c_char) -> *mut c_void;
}
/// `RTLD_NOW`.
const NOW: c_int = 2;

fn find() -> Option<Driver> {
    // SAFETY: both texts end with a zero byte. The symbol is a `DriverTable`, which stays valid because the library is
    // never closed.
    let table = unsafe {
        let library = dlopen(c"libcuda.so.1".as_ptr(), NOW);
        if library.is_null() {
            return None;
        }
        dlsym(library, SYMBOL.as_ptr()).cast::<DriverTable>().as_ref()?
    };
    (table.version == VERSION).then_some(Driver(table))
}
