//! C functions for modules, functions and launches (`cuModule…`, `cuFunc…`, `cuLaunchKernel`).

use std::ffi::{CStr, c_char, c_void};

use tutti_emulated_gpu::Grid;

use super::{Out, Text, calls};
use crate::context;
use crate::error::{Error, Outcome};
use crate::launch;
use crate::module::{self, FUNCTIONS, Function, MODULES};
use crate::state;

/// First bytes of a cubin, which is an ELF file.
const ELF: &[u8] = b"\x7fELF";
/// First bytes of a fat binary.
const FAT_BINARY: &[u8] = &[0x50, 0xed, 0x55, 0xba];
/// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE` and `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: launch attributes that this driver
/// refuses. All other attributes are ignored.
const COOPERATIVE: u32 = 2;
const CLUSTER: u32 = 4;

/// `CUlaunchAttribute`.
#[repr(C)]
pub struct LaunchAttribute {
    id: u32,
    padding: [u8; 4],
    value: [u64; 8],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    blocks: [u32; 3],
    threads: [u32; 3],
    shared_bytes: u32,
    stream: *mut c_void,
    attributes: *const LaunchAttribute,
    attribute_count: u32,
}

calls! {
    fn cuModuleLoadData(handle: Out<*mut c_void>, image: *const c_char) {
        if image.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: an image either is PTX text that ends with a zero byte, or begins with four magic bytes. The
        // comparison of a text shorter than four bytes ends at the zero byte.
        let ptx = unsafe {
            if begins(image, ELF) || begins(image, FAT_BINARY) {
                return Err(Error::NO_BINARY_FOR_GPU);
            }
            CStr::from_ptr(image)
        };
        let ptx = ptx.to_str().map_err(|_| Error::INVALID_IMAGE)?;
        handle.set(module::load(state::current()?, ptx)?)
    }
    fn cuModuleLoadDataEx(handle: Out<*mut c_void>, image: *const c_char, _count: u32, _keys: *mut c_void, _values: *mut c_void) {
        match cuModuleLoadData(handle, image) {
            0 => Ok(()),
            code => Err(Error(code)),
        }
    }
    fn cuModuleLoad(handle: Out<*mut c_void>, file: Text) {
        let name = file.get()?.to_str().map_err(|_| Error::FILE_NOT_FOUND)?;
        let image = std::fs::read(name).map_err(|_| Error::FILE_NOT_FOUND)?;
        if image.starts_with(ELF) || image.starts_with(FAT_BINARY) {
            return Err(Error::NO_BINARY_FOR_GPU);
        }
        let ptx = String::from_utf8(image).map_err(|_| Error::INVALID_IMAGE)?;
        handle.set(module::load(state::current()?, ptx.trim_end_matches('\0'))?)
    }
    fn cuModuleUnload(handle: *mut c_void) {
        module::unload(handle)
    }
    fn cuModuleGetFunction(handle: Out<*mut c_void>, owner: *mut c_void, name: Text) {
        handle.set(module::function(&MODULES.get(owner)?, name.get()?)?)
    }
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, owner: *mut c_void, name: Text) {
        let owner = MODULES.get(owner)?;
        let name = name.get()?.to_str().map_err(|_| Error::NOT_FOUND)?;
        let variable = owner.module.variables.iter().find(|variable| variable.name == name);
        let variable = variable.ok_or(Error::NOT_FOUND)?;
        address.set_if_wanted(variable.address.ok_or(Error::NOT_FOUND)?);
        bytes.set_if_wanted(variable.bytes as usize);
        Ok(())
    }
    fn cuFuncGetName(name: Out<*const c_char>, function: *mut c_void) {
        // The pointer is valid until the module is unloaded, because the module owns the function.
        name.set(FUNCTIONS.get(function)?.name.as_ptr())
    }
    fn cuFuncGetModule(handle: Out<*mut c_void>, function: *mut c_void) {
        let owner = FUNCTIONS.get(function)?.module.clone();
        handle.set(MODULES.handle_of(&owner).ok_or(Error::INVALID_HANDLE)?)
    }
    fn cuFuncGetAttribute(value: Out<i32>, attribute: i32, function: *mut c_void) {
        let function = FUNCTIONS.get(function)?;
        let kernel = function.kernel()?;
        let (major, minor) = state::settings()?.capability;
        value.set(match attribute {
            0 => Function::max_threads(kernel) as i32,
            1 => kernel.static_shared_bytes as i32,
            3 => kernel.local_bytes as i32,
            4 => crate::occupancy::ASSUMED_REGISTERS as i32,
            5 | 6 => (10 * major + minor) as i32,
            8 => function.dynamic_shared_limit(kernel) as i32,
            9 => -1,
            2 | 7 | 10..=15 => 0,
            _ => return Err(Error::INVALID_VALUE),
        })
    }
    fn cuFuncSetAttribute(function: *mut c_void, attribute: i32, value: i32) {
        let function = FUNCTIONS.get(function)?;
        match attribute {
            8 => function.set_dynamic_shared_limit(value),
            // Preferred share of the first-level cache for shared memory, in percent; -1 means the default. It has no
            // effect.
            9 if (-1..=100).contains(&value) => Ok(()),
            _ => Err(Error::INVALID_VALUE),
        }
    }
    fn cuFuncSetCacheConfig(function: *mut c_void, _config: u32) {
        FUNCTIONS.get(function).map(drop)
    }
    fn cuFuncGetParamInfo(function: *mut c_void, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        let function = FUNCTIONS.get(function)?;
        let parameter = *function.kernel()?.parameters.get(index).ok_or(Error::INVALID_VALUE)?;
        offset.set(parameter.offset as usize)?;
        bytes.set_if_wanted(parameter.bytes as usize);
        Ok(())
    }
    fn cuLaunchKernel(
        function: *mut c_void, blocks_x: u32, blocks_y: u32, blocks_z: u32, threads_x: u32, threads_y: u32,
        threads_z: u32, shared_bytes: u32, stream: *mut c_void, arguments: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        let grid = Grid {
            blocks: [blocks_x, blocks_y, blocks_z],
            threads: [threads_x, threads_y, threads_z],
            dynamic_shared_bytes: shared_bytes,
        };
        launch_grid(function, grid, stream, arguments, extra)
    }
    fn cuLaunchKernelEx(
        config: *const LaunchConfig, function: *mut c_void, arguments: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        // SAFETY: the caller passes null or a configuration.
        let config = unsafe { config.as_ref() }.ok_or(Error::INVALID_VALUE)?;
        for index in 0..config.attribute_count as usize {
            // SAFETY: the configuration has `attribute_count` attributes.
            let attribute = unsafe { &*config.attributes.add(index) };
            let one = attribute.value[0] as u32 == 0 || attribute.id == CLUSTER && attribute.value[0] == 0x1_0000_0001;
            if [COOPERATIVE, CLUSTER].contains(&attribute.id) && !one {
                return Err(Error::NOT_SUPPORTED);
            }
        }
        let grid = Grid { blocks: config.blocks, threads: config.threads, dynamic_shared_bytes: config.shared_bytes };
        launch_grid(function, grid, config.stream, arguments, extra)
    }
}

/// # Safety
///
/// `image` has as many bytes as `magic`, or an earlier byte differs.
unsafe fn begins(image: *const c_char, magic: &[u8]) -> bool {
    // SAFETY: all earlier bytes were equal, so by the caller's promise the image has this byte.
    magic.iter().enumerate().all(|(index, &byte)| unsafe { *image.add(index) } as u8 == byte)
}

fn launch_grid(
    function: *mut c_void,
    grid: Grid,
    stream: *mut c_void,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome {
    let function = FUNCTIONS.get(function)?;
    let (context, line) = context::stream(stream)?;
    context.queue.check()?;
    // SAFETY: the program passes `arguments` and `extra` as `cuLaunchKernel` requires.
    let parameters = unsafe { launch::parameters(function.kernel()?, arguments, extra) }?;
    launch::submit(&context, line, function, grid, parameters)
}
