//! Modules and functions: PTX that a program loaded.

use std::ffi::{CStr, CString, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tutti_emulated_gpu::{Kernel, Module};

use crate::context::Context;
use crate::error::{Error, Outcome};
use crate::handles::Handles;
use crate::memory::report;

/// Shared memory per block that every launch may use, in bytes.
pub const SHARED_BYTES: u32 = 48 << 10;
/// Shared memory per block that a function may get on request, in bytes (compute capability 9.0).
pub const SHARED_BYTES_ON_REQUEST: u32 = 227 << 10;

/// Modules by their handles.
pub static MODULES: Handles<LoadedModule> = Handles::new();
/// Functions by their handles.
pub static FUNCTIONS: Handles<Function> = Handles::new();

/// A loaded module.
pub struct LoadedModule {
    /// Context of the module.
    pub context: Arc<Context>,
    /// The decoded PTX.
    pub module: Module,
    /// Names and handles of the functions that the program has looked up. Each function has one handle.
    functions: Mutex<Vec<(String, usize)>>,
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        self.module.unload(&self.context.memory.device);
    }
}

/// A kernel of a loaded module.
pub struct Function {
    /// Module of the kernel.
    pub module: Arc<LoadedModule>,
    /// Name of the kernel.
    pub name: CString,
    /// Limit of dynamic shared memory per launch, in bytes; `u32::MAX` if the program has not set a limit.
    dynamic_shared_bytes: AtomicU32,
}

impl Function {
    /// Returns the decoded kernel.
    ///
    /// # Errors
    ///
    /// `NOT_FOUND`. This never happens, because a function is created only for an existing kernel.
    pub fn kernel(&self) -> Outcome<&Kernel> {
        let name = self.name.to_str().map_err(|_| Error::NOT_FOUND)?;
        self.module.module.kernels.get(name).ok_or(Error::NOT_FOUND)
    }

    /// Returns the dynamic shared memory that a launch may use, in bytes.
    pub fn dynamic_shared_limit(&self, kernel: &Kernel) -> u32 {
        match self.dynamic_shared_bytes.load(Ordering::Relaxed) {
            u32::MAX => SHARED_BYTES.saturating_sub(kernel.static_shared_bytes),
            bytes => bytes,
        }
    }

    /// Sets what [`Function::dynamic_shared_limit`] returns.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` for more shared memory than a block of the device can have.
    pub fn set_dynamic_shared_limit(&self, bytes: i32) -> Outcome {
        let bytes = u32::try_from(bytes).map_err(|_| Error::INVALID_VALUE)?;
        if bytes.saturating_add(self.kernel()?.static_shared_bytes) > SHARED_BYTES_ON_REQUEST {
            return Err(Error::INVALID_VALUE);
        }
        self.dynamic_shared_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Largest number of threads per block.
    pub fn max_threads(kernel: &Kernel) -> u32 {
        kernel.max_threads_per_block.unwrap_or(1024).min(1024)
    }
}

/// Loads PTX text into a context.
///
/// # Errors
///
/// `INVALID_PTX`, with a report, for text that cannot be decoded or is made for another device; `OUT_OF_MEMORY` if the
/// module's variables do not fit.
pub fn load(context: Arc<Context>, ptx: &str) -> Outcome<*mut c_void> {
    context.queue.check()?;
    check_target(&context, ptx)?;
    let mut module = Module::decode(ptx).map_err(|error| {
        report(context.device, &error.to_string());
        Error::INVALID_PTX
    })?;
    module.load(&context.memory.device).map_err(|_| Error::OUT_OF_MEMORY)?;
    Ok(MODULES.insert(Arc::new(LoadedModule { context, module, functions: Mutex::default() })))
}

/// Refuses PTX for a newer device. Also refuses architecture-specific PTX (`sm_90a`) on any other architecture, and
/// family-specific PTX (`sm_100f`) outside of its family.
fn check_target(context: &Context, ptx: &str) -> Outcome {
    let target = ptx.lines().find_map(|line| line.trim().strip_prefix(".target")).unwrap_or_default();
    let target = target.split(',').next().unwrap_or_default().trim();
    let Some(version) = target.strip_prefix("sm_") else {
        report(context.device, "no .target sm_… in the PTX");
        return Err(Error::INVALID_PTX);
    };
    let digits = version.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let (major, minor) = context.settings.capability;
    let own = 10 * major + minor;
    let fits = digits.parse::<u32>().is_ok_and(|wanted| match version.strip_prefix(digits) {
        Some("a") => wanted == own,
        Some("f") => wanted / 10 == major && wanted <= own,
        _ => wanted <= own,
    });
    if !fits {
        report(
            context.device,
            &format!("PTX for {target} does not run on a device of capability {major}.{minor}"),
        );
        return Err(Error::INVALID_PTX);
    }
    Ok(())
}

/// Returns the handle of a module's kernel.
///
/// # Errors
///
/// `NOT_FOUND` if there is no such kernel; `INVALID_PTX`, with a report, if the emulator cannot run the kernel.
pub fn function(module: &Arc<LoadedModule>, name: &CStr) -> Outcome<*mut c_void> {
    let text = name.to_str().map_err(|_| Error::NOT_FOUND)?;
    let kernel = module.module.kernels.get(text).ok_or(Error::NOT_FOUND)?;
    if let Some(error) = &kernel.error {
        report(module.context.device, &format!("kernel {text}: {error}"));
        return Err(Error::INVALID_PTX);
    }
    let mut functions = module.functions.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, handle)) = functions.iter().find(|(known, _)| known == text) {
        return Ok(std::ptr::without_provenance_mut(*handle));
    }
    let function = Function {
        module: module.clone(),
        name: name.to_owned(),
        dynamic_shared_bytes: AtomicU32::new(u32::MAX),
    };
    let handle = FUNCTIONS.insert(Arc::new(function));
    functions.push((text.to_owned(), handle.addr()));
    Ok(handle)
}

/// Waits for the work that may still use a module, and unloads the module.
///
/// # Errors
///
/// `INVALID_HANDLE`.
pub fn unload(handle: *mut c_void) -> Outcome {
    let module = MODULES.remove(handle)?;
    // The wait fails only if the device hangs or has failed. Such a device runs no more work, so the kernels can be
    // freed.
    let _ = module.context.queue.wait_for_all();
    for (_, function) in module.functions.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
        drop(FUNCTIONS.remove(std::ptr::without_provenance_mut(function)));
    }
    Ok(())
}
