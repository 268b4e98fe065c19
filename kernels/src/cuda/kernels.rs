//! The compiled kernels of a GPU, and their launches.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError, module};
use cudarc::driver::sys;

use super::arguments::{Arguments, MOST_ARGUMENTS};
use super::compile::KernelCache;
use super::context::Gpu;
use super::parameters::{self, Widths};
use super::progress;
use super::sources::{DeclaredKernel, Kernel, SOURCES, Source};
use crate::DeviceError;

/// Largest number of thread blocks of a grid in each direction, on all GPUs.
const MOST_BLOCKS: (usize, usize) = (i32::MAX as usize, 65_535);

/// Thread blocks, threads per block, and bytes of dynamic shared memory per block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: (usize, usize),
    pub(super) threads: u32,
    pub(super) shared_bytes: usize,
}

impl Grid {
    /// Returns a grid of `blocks` thread blocks of `threads` threads.
    pub(super) fn of(blocks: usize, threads: u32) -> Self {
        Self { blocks: (blocks, 1), threads, shared_bytes: 0 }
    }

    /// Returns a grid with one thread per item.
    pub(super) fn over(items: usize, threads: u32) -> Self {
        Self::of(items.div_ceil(threads as usize), threads)
    }
}

/// A loaded kernel whose parameters match its declaration.
struct Loaded {
    function: sys::CUfunction,
    /// Largest number of threads per thread block.
    most_threads: u32,
    /// Largest size in bytes of the dynamic shared memory of a thread block.
    most_shared_bytes: usize,
}

/// The kernels of all sources, for one GPU.
pub(super) struct Kernels {
    gpu: Arc<Gpu>,
    modules: Vec<sys::CUmodule>,
    /// The kernels, ordered by index.
    loaded: Vec<Loaded>,
}

// SAFETY: modules and functions belong to the context, which any thread may bind.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Loads all kernels, and compiles those that the cache lacks.
    pub(super) fn load(gpu: &Arc<Gpu>, cache: &KernelCache) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let architecture = format!("compute_{}{}", gpu.capability.0, gpu.capability.1);
        let mut kernels = Self { gpu: gpu.clone(), modules: Vec::new(), loaded: Vec::new() };
        for source in SOURCES {
            let ptx = cache.ptx(source, &architecture, gpu.driver)?;
            kernels.load_source(source, &ptx).map_err(|why| {
                DeviceError::Unsupported(format!(
                    "the kernels of {} for {architecture} are refused: {why}",
                    source.name
                ))
            })?;
        }
        Ok(kernels)
    }

    /// Loads the kernels of a source. If a kernel's parameters differ from the declared arguments, fails before the
    /// driver gets the PTX.
    fn load_source(&mut self, source: &Source, ptx: &str) -> Result<(), String> {
        let by_text = parameters::of_ptx(ptx)?;
        for kernel in source.kernels {
            by_text.get(kernel.name).map_or(Ok(()), |widths| parameters::check(kernel, widths))?;
        }
        let image = CString::new(ptx).map_err(|error| error.to_string())?;
        let refused = |error: DriverError| format!("by the driver: {error}");
        // SAFETY: the image is PTX that ends with a NUL.
        let module = unsafe { module::load_data(image.as_ptr().cast()) }.map_err(refused)?;
        self.modules.push(module);
        self.set_progress(module).map_err(refused)?;
        for kernel in source.kernels {
            self.loaded.push(load_kernel(module, kernel, &by_text)?);
        }
        Ok(())
    }

    /// Sets the module's variable [`progress::VARIABLE`] to the address where each kernel stores a hash of its name
    /// when it begins.
    fn set_progress(&self, loaded: sys::CUmodule) -> Result<(), DriverError> {
        let Ok(name) = CString::new(progress::VARIABLE) else { return Ok(()) };
        let (mut at, mut bytes) = (0, 0);
        // SAFETY: the module is loaded, and its variable is a pointer.
        unsafe {
            sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, loaded, name.as_ptr()).result()?;
            result::memcpy_htod_sync(at, std::slice::from_ref(self.gpu.progress.at()))
        }
    }

    /// Enqueues a kernel. A grid without thread blocks enqueues nothing.
    ///
    /// The number and the widths of the arguments were checked when the kernel was loaded. The grid is checked here.
    /// Nothing here checks that the kernel stays within the device buffers to which the pointers refer. The calling
    /// operation has to compare the sizes with the buffers, and no type proves that it did. The emulated GPU checks
    /// each access, and finds mistakes of this kind.
    pub(super) fn launch<A: Arguments>(
        &self,
        kernel: Kernel<A>,
        grid: Grid,
        arguments: A,
    ) -> Result<(), DeviceError> {
        let Grid { blocks: (x, y), threads, shared_bytes } = grid;
        if x == 0 || y == 0 {
            return Ok(());
        }
        self.gpu.writes.count();
        let name = kernel.name;
        let Some(loaded) = self.loaded.get(kernel.index) else {
            return Err(DeviceError::Unsupported(format!("the kernel {name}, which is not loaded")));
        };
        loaded.check(grid).map_err(|why| DeviceError::Unsupported(format!("the kernel {name}: {why}")))?;
        let mut pointers = [ptr::null_mut::<c_void>(); MOST_ARGUMENTS];
        let pointers = &mut pointers[..A::LIST.len()];
        for (pointer, argument) in pointers.iter_mut().zip(A::LIST) {
            *pointer = (&raw const arguments).cast_mut().wrapping_byte_add(argument.offset).cast();
        }
        let blocks = (x as u32, y as u32, 1);
        // SAFETY: the kernel is loaded, so it takes as many arguments as `A` lists, each with the width that `A` lists.
        // Each pointer points to a field of this width. The driver copies the fields before it returns.
        unsafe {
            result::launch_kernel(
                loaded.function,
                blocks,
                (threads, 1, 1),
                shared_bytes as u32,
                self.gpu.stream,
                pointers,
            )
        }
        .map_err(|error| self.gpu.lost(&format!("the launch of the kernel {name}"), error))
    }
}

impl Loaded {
    /// Returns an error for a grid beyond the limits of the GPU or of the kernel.
    fn check(&self, grid: Grid) -> Result<(), String> {
        let Grid { blocks: (x, y), threads, shared_bytes } = grid;
        if x > MOST_BLOCKS.0 || y > MOST_BLOCKS.1 {
            return Err(format!("{x} x {y} blocks, the limit is {} x {}", MOST_BLOCKS.0, MOST_BLOCKS.1));
        }
        if threads == 0 || threads > self.most_threads {
            return Err(format!("blocks of {threads} threads, the limit is {}", self.most_threads));
        }
        if shared_bytes > self.most_shared_bytes {
            let limit = self.most_shared_bytes;
            return Err(format!("{shared_bytes} bytes of dynamic shared memory, the limit is {limit}"));
        }
        Ok(())
    }
}

/// Loads a kernel of a module and checks its parameters. Their widths come from `by_text` or, if the text does not name
/// the kernel, from the driver.
fn load_kernel(
    module: sys::CUmodule,
    kernel: &DeclaredKernel,
    by_text: &HashMap<&str, Widths>,
) -> Result<Loaded, String> {
    let name = kernel.name;
    let refused = |error: DriverError| format!("by the driver, the kernel {name}: {error}");
    let symbol = CString::new(name).map_err(|error| error.to_string())?;
    // SAFETY: the module is loaded.
    let function = unsafe { module::get_function(module, symbol) }.map_err(refused)?;
    if !by_text.contains_key(name) {
        // SAFETY: the module is loaded.
        let widths = unsafe { parameters::of_function(function) }
            .ok_or_else(|| format!("neither the text nor the driver says what the kernel {name} takes"))?;
        parameters::check(kernel, &widths.map_err(refused)?)?;
    }
    let limit = |attribute| {
        // SAFETY: the module is loaded.
        let limit = unsafe { result::function::get_function_attribute(function, attribute) };
        limit.map(|limit| u32::try_from(limit).unwrap_or(0)).map_err(refused)
    };
    use sys::CUfunction_attribute as Attribute;
    Ok(Loaded {
        function,
        most_threads: limit(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        most_shared_bytes: limit(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)? as usize,
    })
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        let _ = self.gpu.synchronize();
        for &loaded in &self.modules {
            // SAFETY: no kernel of the module runs any more. An error is ignored, because there is nothing left to do.
            unsafe {
                let _ = module::unload(loaded);
            }
        }
    }
}

#[cfg(test)]
mod tests;
