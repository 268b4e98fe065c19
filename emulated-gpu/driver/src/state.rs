//! State of the process: settings, primary contexts, and each thread's current context.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::context::Context;
use crate::error::{Error, Outcome};
use crate::settings::Settings;

static SETTINGS: OnceLock<Result<Settings, String>> = OnceLock::new();

/// Primary contexts by device, each with the number of its retains.
static PRIMARY: Mutex<Vec<(usize, Arc<Context>, usize)>> = Mutex::new(Vec::new());

thread_local! {
    /// The stack of current contexts: handles, the last one on top.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Reads the settings (`cuInit`).
///
/// # Errors
///
/// `OPERATING_SYSTEM` if a setting is wrong, which is printed; `NO_DEVICE` if there is none.
pub fn initialise() -> Outcome {
    match SETTINGS.get_or_init(|| Settings::read(|name| std::env::var(name).ok())) {
        Ok(settings) if settings.devices.is_empty() => Err(Error::NO_DEVICE),
        Ok(_) => Ok(()),
        Err(error) => {
            eprintln!("emulated GPUs: {error}");
            Err(Error::OPERATING_SYSTEM)
        }
    }
}

/// Settings of the process.
///
/// # Errors
///
/// `NOT_INITIALIZED` before [`initialise`].
pub fn settings() -> Outcome<&'static Settings> {
    SETTINGS.get().and_then(|settings| settings.as_ref().ok()).ok_or(Error::NOT_INITIALIZED)
}

fn primary() -> MutexGuard<'static, Vec<(usize, Arc<Context>, usize)>> {
    PRIMARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Index of a device, checked.
///
/// # Errors
///
/// `INVALID_DEVICE`.
pub fn device(index: i32) -> Outcome<usize> {
    let settings = settings()?;
    usize::try_from(index).ok().filter(|&index| index < settings.devices.len()).ok_or(Error::INVALID_DEVICE)
}

/// Retains the primary context of a device, which is created if there is none.
///
/// # Errors
///
/// `INVALID_DEVICE`.
pub fn retain(index: i32) -> Outcome<*mut c_void> {
    let ordinal = device(index)?;
    let settings = settings()?;
    let mut primary = primary();
    if let Some((_, context, retains)) = primary.iter_mut().find(|(device, ..)| *device == ordinal) {
        *retains += 1;
        return Ok(std::ptr::without_provenance_mut(context.handle));
    }
    let context = Arc::new(Context::new(settings, ordinal));
    let made = context.handle;
    primary.push((ordinal, context, 1));
    Ok(std::ptr::without_provenance_mut(made))
}

/// Releases the primary context of a device; the last release ends it: streams, memory and its error.
///
/// # Errors
///
/// `INVALID_CONTEXT` if it is not retained.
pub fn release(index: i32) -> Outcome {
    let ordinal = device(index)?;
    let mut primary = primary();
    let at = primary.iter().position(|(device, ..)| *device == ordinal).ok_or(Error::INVALID_CONTEXT)?;
    primary[at].2 -= 1;
    if primary[at].2 == 0 {
        let (_, context, _) = primary.swap_remove(at);
        drop(primary);
        context.queue.shut();
    }
    Ok(())
}

/// All contexts that live.
pub fn contexts() -> Vec<Arc<Context>> {
    primary().iter().map(|(_, context, _)| context.clone()).collect()
}

/// The context of a handle.
///
/// # Errors
///
/// `INVALID_CONTEXT` if it is gone or never was.
pub fn context(handle: *mut c_void) -> Outcome<Arc<Context>> {
    let found =
        primary().iter().find(|(_, context, _)| context.handle == handle.addr()).map(|(_, c, _)| c.clone());
    found.ok_or(Error::INVALID_CONTEXT)
}

/// The calling thread's current context.
///
/// # Errors
///
/// `NOT_INITIALIZED` before `cuInit`, `INVALID_CONTEXT` if none is current.
pub fn current() -> Outcome<Arc<Context>> {
    settings()?;
    context(current_handle())
}

/// Handle of the calling thread's current context, or null.
pub fn current_handle() -> *mut c_void {
    let top = CURRENT.with_borrow(|stack| stack.last().copied());
    top.map_or(std::ptr::null_mut(), std::ptr::without_provenance_mut)
}

/// Makes a context current in place of the one that is; null leaves none.
///
/// # Errors
///
/// `INVALID_CONTEXT`.
pub fn set_current(new: *mut c_void) -> Outcome {
    if !new.is_null() {
        context(new)?;
    }
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        if !new.is_null() {
            stack.push(new.addr());
        }
    });
    Ok(())
}

/// Makes a context current above the one that is.
///
/// # Errors
///
/// `INVALID_CONTEXT`.
pub fn push_current(new: *mut c_void) -> Outcome {
    context(new)?;
    CURRENT.with_borrow_mut(|stack| stack.push(new.addr()));
    Ok(())
}

/// Takes the current context from the top.
///
/// # Errors
///
/// `INVALID_CONTEXT` if none is current.
pub fn pop_current() -> Outcome<*mut c_void> {
    let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(Error::INVALID_CONTEXT)?;
    Ok(std::ptr::without_provenance_mut(popped))
}
