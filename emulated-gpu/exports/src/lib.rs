//! Exports of the emulated `libcuda.so.1` for its sister libraries: work in a stream's order, and access to device
//! memory.
//!
//! Libraries of one process share nothing but symbols. The driver exports one, [`SYMBOL`]: a table of C functions. A
//! sister library opens `libcuda.so.1` by name, as NVIDIA's libraries do, so that it finds the driver that the program
//! uses.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

/// Name of the table's symbol.
pub const SYMBOL: &CStr = c"tutti_emulated_driver_table";
/// Version of the table's layout.
pub const VERSION: u32 = 1;

/// Work that a sister library puts into a stream. It is called once: with `run` to run and return a `CUresult`, or
/// without to be dropped.
pub type RawWork = unsafe extern "C" fn(state: *mut c_void, run: bool) -> c_int;

/// Functions of the driver. All return a `CUresult` unless they say otherwise.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DriverTable {
    /// [`VERSION`] of the library that made the table.
    pub version: u32,
    /// Stores context handle, device index among all devices and ordinal of a stream (null: of the current context).
    pub describe: unsafe extern "C" fn(stream: *mut c_void, of: *mut StreamContext) -> c_int,
    /// Puts work into a stream. `blocking` work may wait for other processes. On an error the work is dropped.
    pub submit:
        unsafe extern "C" fn(stream: *mut c_void, blocking: bool, work: RawWork, state: *mut c_void) -> c_int,
    /// Returns true if a range lies in one allocation of a context.
    pub holds: extern "C" fn(context: *mut c_void, address: u64, bytes: u64) -> bool,
    /// Returns the host address of a range that unblocking work is about to read, or null after a report.
    pub readable:
        extern "C" fn(context: *mut c_void, address: u64, bytes: u64, by: *const c_char) -> *const u8,
    /// Returns the host address of a range that unblocking work writes in full, or null after a report.
    pub writable: extern "C" fn(context: *mut c_void, address: u64, bytes: u64, by: *const c_char) -> *mut u8,
    /// Copies device memory out, for blocking work.
    pub copy_out:
        unsafe extern "C" fn(context: *mut c_void, target: *mut u8, source: u64, bytes: u64) -> c_int,
    /// Copies into device memory, for blocking work.
    pub copy_in:
        unsafe extern "C" fn(context: *mut c_void, target: u64, source: *const u8, bytes: u64) -> c_int,
    /// Returns true if the call `name` of a device is never to be joined (a fault on demand).
    pub never_joins: unsafe extern "C" fn(device: u32, name: *const c_char) -> bool,
}

/// Handle of a stream, a number that the driver looks up; null names the current context's default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub *mut c_void);

// SAFETY: the handle is a number.
unsafe impl Send for Stream {}

/// Context of a stream.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamContext {
    /// Handle of the context.
    pub context: *mut c_void,
    /// Index of the device among all devices.
    pub device: u32,
    /// Index of the device among those that the process sees.
    pub ordinal: u32,
}

// SAFETY: the handle is a number; the driver looks it up.
unsafe impl Send for StreamContext {}
// SAFETY: as above.
unsafe impl Sync for StreamContext {}

/// A `CUresult` that is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError(pub c_int);

/// Sticky error of work that failed for reasons of its own (`CUDA_ERROR_LAUNCH_FAILED`).
pub const LAUNCH_FAILED: DriverError = DriverError(719);
/// Error of work that met a bad device address (`CUDA_ERROR_ILLEGAL_ADDRESS`).
pub const ILLEGAL_ADDRESS: DriverError = DriverError(700);

/// Work of a stream. An error is the context's from then on.
pub type Work = Box<dyn FnOnce() -> Result<(), DriverError> + Send>;

/// Whether work may wait for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// Runs while nothing else of the device does.
    Computing,
    /// Runs beside other streams' work, and may wait for other processes.
    Blocking,
}

/// The emulated driver of this process.
#[derive(Clone, Copy)]
pub struct Driver(&'static DriverTable);

fn result(code: c_int) -> Result<(), DriverError> {
    if code == 0 { Ok(()) } else { Err(DriverError(code)) }
}

unsafe extern "C" fn call(state: *mut c_void, run: bool) -> c_int {
    // SAFETY: `Driver::submit` made the state, and the driver passes it once.
    let work = unsafe { Box::from_raw(state.cast::<Work>()) };
    if !run {
        return 0;
    }
    work().err().map_or(0, |error| error.0)
}

impl Driver {
    /// Opens the driver; none if `libcuda.so.1` is missing or is not the emulated one.
    pub fn open() -> Option<Driver> {
        static TABLE: OnceLock<Option<Driver>> = OnceLock::new();
        *TABLE.get_or_init(find)
    }

    /// The context of a stream.
    ///
    /// # Errors
    ///
    /// The driver's error for a wrong stream or a missing context.
    pub fn describe(&self, stream: Stream) -> Result<StreamContext, DriverError> {
        let mut of = StreamContext { context: std::ptr::null_mut(), device: 0, ordinal: 0 };
        // SAFETY: `of` is good for a write.
        result(unsafe { (self.0.describe)(stream.0, &raw mut of) })?;
        Ok(of)
    }

    /// Puts work into a stream.
    ///
    /// # Errors
    ///
    /// The context's sticky error, or the error of a wrong stream. The work is dropped then.
    pub fn submit(&self, stream: Stream, kind: WorkKind, work: Work) -> Result<(), DriverError> {
        let state = Box::into_raw(Box::new(work));
        // SAFETY: `call` takes the state back, once.
        result(unsafe { (self.0.submit)(stream.0, kind == WorkKind::Blocking, call, state.cast()) })
    }

    /// True if a range lies in one allocation of a context.
    pub fn holds(&self, of: StreamContext, address: u64, bytes: u64) -> bool {
        (self.0.holds)(of.context, address, bytes)
    }

    /// Bytes that computing work reads. The driver reports a range that is not in one allocation and, where it checks,
    /// bytes that nothing wrote; `by` names the reader.
    ///
    /// # Errors
    ///
    /// [`ILLEGAL_ADDRESS`] for such a range.
    ///
    /// # Safety
    ///
    /// The slice is used inside the work alone, and nothing writes to the range meanwhile.
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
        // SAFETY: the driver returned the start of a range of so many bytes, which no free takes before the work ends.
        Ok(unsafe { std::slice::from_raw_parts(start, bytes as usize) })
    }

    /// Bytes that computing work writes in full.
    ///
    /// # Errors
    ///
    /// [`ILLEGAL_ADDRESS`] for a range that is not in one allocation.
    ///
    /// # Safety
    ///
    /// The slice is used inside the work alone, and nothing else uses the range meanwhile.
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
        // SAFETY: as for `readable`.
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

    /// True if the call `name` of a device is never to be joined.
    pub fn never_joins(&self, device: u32, name: &str) -> bool {
        let Ok(name) = CString::new(name) else { return false };
        // SAFETY: the name ends with a zero byte.
        unsafe { (self.0.never_joins)(device, name.as_ptr()) }
    }
}

// The dynamic loader, which the standard library links already.
unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, symbol: *const c_char) -> *mut c_void;
}
/// `RTLD_NOW`.
const NOW: c_int = 2;

fn find() -> Option<Driver> {
    // SAFETY: both texts end with a zero byte; the library stays open. The symbol is a `DriverTable` that lives as
    // long.
    let table = unsafe {
        let library = dlopen(c"libcuda.so.1".as_ptr(), NOW);
        if library.is_null() {
            return None;
        }
        dlsym(library, SYMBOL.as_ptr()).cast::<DriverTable>().as_ref()?
    };
    (table.version == VERSION).then_some(Driver(table))
}
