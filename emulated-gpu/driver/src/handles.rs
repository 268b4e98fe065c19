//! Handles of objects. A handle is a number that is never reused, so that a stale handle gives an error.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Outcome};

/// The next handle. Handles are multiples of 16 above the values that CUDA reserves for default streams. Handles are
/// not addresses.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// Returns a handle that no object has had.
pub fn unused() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Objects of one kind by their handles.
pub struct Handles<T>(LazyLock<Mutex<HashMap<usize, Arc<T>>>>);

impl<T> Handles<T> {
    /// Creates an empty table.
    pub const fn new() -> Self {
        Handles(LazyLock::new(Mutex::default))
    }

    /// Adds an object and returns its new handle.
    pub fn insert(&self, object: Arc<T>) -> *mut c_void {
        let handle = unused();
        self.lock().insert(handle, object);
        std::ptr::without_provenance_mut(handle)
    }

    /// Returns the object of a handle.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` if no object has the handle.
    pub fn get(&self, handle: *mut c_void) -> Outcome<Arc<T>> {
        self.lock().get(&handle.addr()).cloned().ok_or(Error::INVALID_HANDLE)
    }

    /// Removes an object and returns it.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` if no object has the handle.
    pub fn remove(&self, handle: *mut c_void) -> Outcome<Arc<T>> {
        self.lock().remove(&handle.addr()).ok_or(Error::INVALID_HANDLE)
    }

    /// Returns the handle of an object; none if the object has been removed.
    pub fn handle_of(&self, object: &Arc<T>) -> Option<*mut c_void> {
        let objects = self.lock();
        let found = objects.iter().find(|(_, other)| Arc::ptr_eq(other, object));
        found.map(|(handle, _)| std::ptr::without_provenance_mut(*handle))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
