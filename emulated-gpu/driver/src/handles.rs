//! Handles of objects. A handle is a number that is used only once, so that a stale handle is an error.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Outcome};

/// Next handle. Handles are multiples of 16, above the values that CUDA reserves for default streams. They are not
/// addresses.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// Returns a handle that no object has.
pub fn unused() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Objects of one kind by their handles.
pub struct Handles<T>(LazyLock<Mutex<HashMap<usize, Arc<T>>>>);

impl<T> Handles<T> {
    /// An empty table.
    pub const fn new() -> Self {
        Handles(LazyLock::new(Mutex::default))
    }

    /// Gives an object a handle.
    pub fn insert(&self, object: Arc<T>) -> *mut c_void {
        let handle = unused();
        self.lock().insert(handle, object);
        std::ptr::without_provenance_mut(handle)
    }

    /// Returns the object of a handle.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` if there is none.
    pub fn get(&self, handle: *mut c_void) -> Outcome<Arc<T>> {
        self.lock().get(&handle.addr()).cloned().ok_or(Error::INVALID_HANDLE)
    }

    /// Takes an object out.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` if there is none.
    pub fn remove(&self, handle: *mut c_void) -> Outcome<Arc<T>> {
        self.lock().remove(&handle.addr()).ok_or(Error::INVALID_HANDLE)
    }

    /// Handle of an object; none if it has been taken out.
    pub fn handle_of(&self, object: &Arc<T>) -> Option<*mut c_void> {
        let objects = self.lock();
        let found = objects.iter().find(|(_, other)| Arc::ptr_eq(other, object));
        found.map(|(handle, _)| std::ptr::without_provenance_mut(*handle))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
