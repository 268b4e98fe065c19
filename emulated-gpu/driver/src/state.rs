//! State of the process: settings, primary contexts, and each thread's current context.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::context::Context;
use crate::error::{Error, Outcome};
use crate::settings::Settings;

static SETTINGS: OnceLock<Result<Settings, String>> = OnceLock::new();

/// The primary contexts: the device's ordinal, the context, and its number of retains.
static PRIMARY: Mutex<Vec<(usize, Arc<Context>, usize)>> = Mutex::new(Vec::new());

thread_local! {
    /// The stack of current contexts, as handles. The last element is the handle of the current context.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Reads the settings (`cuInit`).
///
/// # Errors
///
/// `OPERATING_SYSTEM`, with a printed message, if a setting is wrong; `NO_DEVICE` if the process sees no device.
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

/// Converts a device's index, and checks that the device exists.
///
/// # Errors
///
/// `INVALID_DEVICE`.
pub fn device(index: i32) -> Outcome<usize> {
    let settings = settings()?;
    usize::try_from(index).ok().filter(|&index| index < settings.devices.len()).ok_or(Error::INVALID_DEVICE)
}

/// Retains the primary context of a device. Creates the context if the device has none.
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

/// Releases the primary context of a device. The last release ends the context: its streams, its memory and its sticky
/// error.
///
/// # Errors
///
/// `INVALID_CONTEXT` if the context is not retained.
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

/// Returns all contexts that exist.
pub fn contexts() -> Vec<Arc<Context>> {
    primary().iter().map(|(_, context, _)| context.clone()).collect()
}

/// Returns the context of a handle.
///
/// # Errors
///
/// `INVALID_CONTEXT` if no context has the handle.
pub fn context(handle: *mut c_void) -> Outcome<Arc<Context>> {
    let found =
        primary().iter().find(|(_, context, _)| context.handle == handle.addr()).map(|(_, c, _)| c.clone());
    found.ok_or(Error::INVALID_CONTEXT)
}

/// Returns the calling thread's current context.
///
/// # Errors
///
/// `NOT_INITIALIZED` before `cuInit`, `INVALID_CONTEXT` if the thread has no current context.
pub fn current() -> Outcome<Arc<Context>> {
    settings()?;
    context(current_handle())
}

/// Returns the handle of the calling thread's current context; null if the thread has none.
pub fn current_handle() -> *mut c_void {
    let top = CURRENT.with_borrow(|stack| stack.last().copied());
    top.map_or(std::ptr::null_mut(), std::ptr::without_provenance_mut)
}

/// Replaces the calling thread's current context. After null, the thread has no current context.
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

/// Pushes a context on the calling thread's stack, which makes it the current context.
///
/// # Errors
///
/// `INVALID_CONTEXT`.
pub fn push_current(new: *mut c_void) -> Outcome {
    context(new)?;
    CURRENT.with_borrow_mut(|stack| stack.push(new.addr()));
    Ok(())
}

/// Pops the current context from the calling thread's stack.
///
/// # Errors
///
/// `INVALID_CONTEXT` if the stack is empty.
pub fn pop_current() -> Outcome<*mut c_void> {
    let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(Error::INVALID_CONTEXT)?;
    Ok(std::ptr::without_provenance_mut(popped))
}
