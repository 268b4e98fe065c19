//! The compiled kernels of a GPU, and their launches.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError, module};
use cudarc::driver::sys;

use super::compile::{KernelCache, SOURCES};
use super::context::Gpu;
use super::progress;
use crate::DeviceError;

/// An argument of a kernel, with the size that the kernel's source declares.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument {
    /// A device pointer or a `u64`.
    Wide(u64),
    /// A `u32` or an `int`.
    Word(u32),
    /// An f32.
    Float(f32),
}

impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Self::Wide(value)
    }
}

impl From<u32> for Argument {
    fn from(value: u32) -> Self {
        Self::Word(value)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// Collects arguments, in the order of the kernel's parameters.
macro_rules! arguments {
    ($($argument:expr),* $(,)?) => { &[$($crate::cuda::kernels::Argument::from($argument)),*] };
}
pub(super) use arguments;

/// Blocks, threads per block, and bytes of dynamic shared memory per block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: (usize, usize),
    pub(super) threads: u32,
    pub(super) shared_bytes: usize,
}

impl Grid {
    /// `blocks` blocks of `threads` threads.
    pub(super) fn of(blocks: usize, threads: u32) -> Self {
        Self { blocks: (blocks, 1), threads, shared_bytes: 0 }
    }

    /// A thread per item.
    pub(super) fn over(items: usize, threads: u32) -> Self {
        Self::of(items.div_ceil(threads as usize), threads)
    }
}

/// The kernels of all sources, for one GPU.
pub(super) struct Kernels {
    gpu: Arc<Gpu>,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<&'static str, sys::CUfunction>,
}

// SAFETY: modules and functions belong to the context, which any thread may bind.
unsafe impl Send for Kernels {}

impl Kernels {
    /// Compiles what the cache lacks, and loads all.
    pub(super) fn load(gpu: &Arc<Gpu>, cache: &KernelCache) -> Result<Self, DeviceError> {
        gpu.bind()?;
        let architecture = format!("compute_{}{}", gpu.capability.0, gpu.capability.1);
        let mut kernels = Self { gpu: gpu.clone(), modules: Vec::new(), functions: HashMap::new() };
        for source in SOURCES {
            let ptx = CString::new(cache.ptx(source, &architecture, gpu.driver)?)
                .map_err(|error| DeviceError::Unsupported(format!("{}: {error}", source.name)))?;
            let refused = |error| {
                let why =
                    format!("the driver refuses the kernels of {} for {architecture}: {error}", source.name);
                DeviceError::Unsupported(why)
            };
            // SAFETY: the image is PTX that ends with a NUL.
            let loaded = unsafe { module::load_data(ptx.as_ptr().cast()) }.map_err(refused)?;
            kernels.modules.push(loaded);
            kernels.set_progress(loaded).map_err(refused)?;
            for &name in source.kernels {
                let symbol =
                    CString::new(name).map_err(|error| DeviceError::Unsupported(error.to_string()))?;
                // SAFETY: the module is loaded.
                let function = unsafe { module::get_function(loaded, symbol) }.map_err(refused)?;
                kernels.functions.insert(name, function);
            }
        }
        Ok(kernels)
    }

    /// Tells a module's kernels where they store that they begin.
    fn set_progress(&self, loaded: sys::CUmodule) -> Result<(), DriverError> {
        let Ok(name) = CString::new(progress::VARIABLE) else { return Ok(()) };
        let (mut at, mut bytes) = (0, 0);
        // SAFETY: the module is loaded, and its variable is a pointer.
        unsafe {
            sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, loaded, name.as_ptr()).result()?;
            result::memcpy_htod_sync(at, std::slice::from_ref(self.gpu.progress.at()))
        }
    }

    /// Enqueues a kernel. A grid without blocks enqueues nothing.
    pub(super) fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), DeviceError> {
        let Grid { blocks: (x, y), threads, shared_bytes } = grid;
        if x == 0 || y == 0 {
            return Ok(());
        }
        let Some(&function) = self.functions.get(name) else {
            return Err(DeviceError::Unsupported(format!("the kernel {name}")));
        };
        let count = |blocks: usize| {
            u32::try_from(blocks)
                .map_err(|_| DeviceError::Unsupported(format!("{blocks} blocks of the kernel {name}")))
        };
        let blocks = (count(x)?, count(y)?, 1);
        let mut pointers: Vec<*mut c_void> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Wide(value) => (&raw const *value).cast_mut().cast(),
                Argument::Word(value) => (&raw const *value).cast_mut().cast(),
                Argument::Float(value) => (&raw const *value).cast_mut().cast(),
            })
            .collect();
        // SAFETY: each pointer is valid for its parameter, and the driver copies the values at once. The kernels stay
        // inside the buffers whose sizes the callers have checked.
        unsafe {
            result::launch_kernel(
                function,
                blocks,
                (threads, 1, 1),
                shared_bytes as u32,
                self.gpu.stream,
                &mut pointers,
            )
        }
        .map_err(|error| self.gpu.lost(&format!("the launch of the kernel {name}"), error))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.gpu.bind();
        let _ = self.gpu.synchronize();
        for &loaded in &self.modules {
            // SAFETY: no kernel of the module runs any more. An error changes nothing.
            unsafe {
                let _ = module::unload(loaded);
            }
        }
    }
}
