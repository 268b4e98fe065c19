//! The C functions of `cublasLt.h`.

use std::ffi::{c_char, c_void};

use tutti_emulated_exports::{Driver, Stream, WorkKind};

use crate::objects::{Description, Layout, Preference};
use crate::problem::{Algorithm, Problem, Variant};
use crate::product::{self, Call};
use crate::status::{Status, name};

/// Version that the library reports: cuBLASLt of CUDA 13.0.
const VERSION: usize = 130_000;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

impl HeuristicResult {
    fn of(algorithm: Algorithm) -> Self {
        let workspace_bytes = algorithm.workspace_bytes as usize;
        Self { algorithm, workspace_bytes, state: 0, waves: 1.0, reserved: [0; 4] }
    }
}

fn code(result: Result<(), Status>) -> i32 {
    result.err().map_or(0, |status| status.0)
}

/// Moves an object to the heap and stores its pointer in the program's `handle`.
///
/// # Safety
///
/// `handle` is null or valid for a write.
unsafe fn create<T>(handle: *mut *mut T, object: T) -> i32 {
    if handle.is_null() {
        return Status::INVALID_VALUE.0;
    }
    // SAFETY: `handle` is not null, so the caller promises that it is valid for a write.
    unsafe { handle.write(Box::into_raw(Box::new(object))) };
    0
}

/// Frees an object that [`create`] made.
///
/// # Safety
///
/// `object` is null or came from [`create`] and was not destroyed.
unsafe fn destroy<T>(object: *mut T) -> i32 {
    if object.is_null() {
        return Status::INVALID_VALUE.0;
    }
    // SAFETY: the caller promises that [`create`] boxed this object and that it was not destroyed before.
    drop(unsafe { Box::from_raw(object) });
    0
}

/// Sets an attribute of an object from the attribute's bytes, by calling `set`.
///
/// # Safety
///
/// `object` is null or was not destroyed; `value` is null or has `bytes` bytes.
unsafe fn set<T>(
    object: *mut T,
    attribute: u32,
    value: *const c_void,
    bytes: usize,
    set: fn(&mut T, u32, &[u8]) -> Result<(), Status>,
) -> i32 {
    // SAFETY: the caller promises that `object` is null or was not destroyed.
    let Some(object) = (unsafe { object.as_mut() }) else { return Status::INVALID_VALUE.0 };
    if value.is_null() {
        return Status::INVALID_VALUE.0;
    }
    // SAFETY: `value` is not null, so the caller promises that it has `bytes` bytes.
    code(set(object, attribute, unsafe { std::slice::from_raw_parts(value.cast(), bytes) }))
}

/// Creates a handle. A handle holds no state, because each call names its stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(handle: *mut *mut u64) -> i32 {
    if Driver::open().is_none() {
        eprintln!("emulated cublasLt: libcuda.so.1 is not the emulated driver");
        return Status::NOT_INITIALIZED.0;
    }
    // SAFETY: the program passes null or a pointer that is valid for a write.
    unsafe { create(handle, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtDestroy(handle: *mut u64) -> i32 {
    // SAFETY: the program passes null or a handle that it has not destroyed.
    unsafe { destroy(handle) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    VERSION
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusName(status: i32) -> *const c_char {
    name(status).as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: i32) -> *const c_char {
    name(status).as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    layout: *mut *mut Layout,
    kind: i32,
    rows: u64,
    columns: u64,
    leading: i64,
) -> i32 {
    let object = Layout { kind, order: 0, rows, columns, leading, batch: 1, stride: 0 };
    // SAFETY: the program passes null or a pointer that is valid for a write.
    unsafe { create(layout, object) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutDestroy(layout: *mut Layout) -> i32 {
    // SAFETY: the program passes null or an object that it has not destroyed.
    unsafe { destroy(layout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutSetAttribute(
    layout: *mut Layout,
    attribute: u32,
    value: *const c_void,
    bytes: usize,
) -> i32 {
    // SAFETY: the program passes null or an object that it has not destroyed, and a value of `bytes` bytes.
    unsafe { set(layout, attribute, value, bytes, Layout::set) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(
    description: *mut *mut Description,
    compute: i32,
    scale: i32,
) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    unsafe { create(description, Description::new(compute, scale)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescDestroy(description: *mut Description) -> i32 {
    // SAFETY: the program passes null or an object that it has not destroyed.
    unsafe { destroy(description) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    description: *mut Description,
    attribute: u32,
    value: *const c_void,
    bytes: usize,
) -> i32 {
    // SAFETY: the program passes null or an object that it has not destroyed, and a value of `bytes` bytes.
    unsafe { set(description, attribute, value, bytes, Description::set) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(preference: *mut *mut Preference) -> i32 {
    // SAFETY: the program passes null or a pointer that is valid for a write.
    unsafe { create(preference, Preference::new()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(preference: *mut Preference) -> i32 {
    // SAFETY: the program passes null or an object that it has not destroyed.
    unsafe { destroy(preference) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: *mut Preference,
    attribute: u32,
    value: *const c_void,
    bytes: usize,
) -> i32 {
    // SAFETY: the program passes null or an object that it has not destroyed, and a value of `bytes` bytes.
    unsafe { set(preference, attribute, value, bytes, Preference::set) }
}

/// Builds the problem that a call's descriptors describe.
///
/// # Safety
///
/// The pointers are null or point to objects that the program has not destroyed.
unsafe fn problem(description: *const Description, layouts: [*const Layout; 4]) -> Result<Problem, Status> {
    // SAFETY: the caller promises that the description is null or was not destroyed.
    let description = unsafe { description.as_ref() }.ok_or(Status::INVALID_VALUE)?;
    // SAFETY: the caller promises that each layout is null or was not destroyed.
    let [a, b, c, d] = layouts.map(|layout| unsafe { layout.as_ref() }.ok_or(Status::INVALID_VALUE));
    Problem::new(description, [a?, b?, c?, d?])
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: *mut u64,
    description: *const Description,
    a: *const Layout,
    b: *const Layout,
    c: *const Layout,
    d: *const Layout,
    preference: *const Preference,
    wanted: i32,
    results: *mut HeuristicResult,
    found: *mut i32,
) -> i32 {
    if handle.is_null() || results.is_null() || found.is_null() || wanted < 1 {
        return Status::INVALID_VALUE.0;
    }
    // SAFETY: the program passes null or objects that it has not destroyed. A null preference means the defaults.
    let (problem, preference) = unsafe { (problem(description, [a, b, c, d]), preference.as_ref()) };
    let problem = match problem {
        Ok(problem) => problem,
        Err(status) => {
            // SAFETY: the program passes a pointer that is valid for a write.
            unsafe { found.write(0) };
            return status.0;
        }
    };
    let preference = preference.copied().unwrap_or_else(Preference::new);
    let algorithms = Variant::ALL.map(|variant| Algorithm::new(&problem, &preference, variant));
    let supported = algorithms.iter().filter(|algorithm| algorithm.supports(&problem).is_ok());
    let mut count = 0;
    for algorithm in supported.take((wanted as usize).min(most_algorithms())) {
        // SAFETY: the program passes a pointer to `wanted` results, which are valid for writes.
        unsafe { results.add(count).write(HeuristicResult::of(*algorithm)) };
        count += 1;
    }
    // SAFETY: the program passes a pointer that is valid for a write.
    unsafe { found.write(count as i32) };
    0
}

/// Number of algorithms that the library proposes for a product, at most.
fn most_algorithms() -> usize {
    std::env::var("EMULATED_CUBLASLT_ALGORITHMS").ok().and_then(|most| most.parse().ok()).unwrap_or(1)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    handle: *mut u64,
    description: *const Description,
    alpha: *const f32,
    a: *const c_void,
    a_layout: *const Layout,
    b: *const c_void,
    b_layout: *const Layout,
    beta: *const f32,
    c: *const c_void,
    c_layout: *const Layout,
    d: *mut c_void,
    d_layout: *const Layout,
    algorithm: *const Algorithm,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> i32 {
    if handle.is_null() || alpha.is_null() || beta.is_null() {
        return Status::INVALID_VALUE.0;
    }
    let addresses = [a, b, c, d.cast_const()].map(|pointer| pointer.addr() as u64);
    let workspace = (workspace.addr() as u64, workspace_bytes as u64);
    // SAFETY: the program passes objects and factors that are valid during this call.
    let (problem, alpha, beta, algorithm) = unsafe {
        (
            problem(description, [a_layout, b_layout, c_layout, d_layout]),
            *alpha,
            *beta,
            algorithm.as_ref().copied(),
        )
    };
    code(problem.and_then(|problem| {
        let preference = Preference { workspace_bytes: workspace.1, ..Preference::new() };
        let algorithm = algorithm.unwrap_or_else(|| Algorithm::new(&problem, &preference, Variant::Plain));
        algorithm.check(&problem, addresses, workspace)?;
        let variant = algorithm.variant().ok_or(Status::INVALID_VALUE)?;
        let workspace = (workspace.0, algorithm.workspace_bytes);
        submit(Call { problem, variant, alpha, beta, addresses, workspace }, Stream(stream))
    }))
}

/// Enqueues a matrix product in a stream. Returns an error at once if an operand's address is in no allocation.
fn submit(call: Call, stream: Stream) -> Result<(), Status> {
    let driver = Driver::open().ok_or(Status::NOT_INITIALIZED)?;
    let of = driver.describe(stream).map_err(|_| Status::INVALID_VALUE)?;
    let [a, b, c, d] = call.addresses;
    let needed = [a, b, d].into_iter().chain((call.beta != 0.0).then_some(c));
    if needed.into_iter().any(|address| !driver.holds(of, address, 1)) {
        return Err(Status::INVALID_VALUE);
    }
    let work = Box::new(move || product::run(driver, of, &call));
    driver.submit(stream, WorkKind::Computing, work).map_err(|_| Status::EXECUTION_FAILED)
}
