//! Tests the driver through the unmodified cudarc: modules and launches.
#![allow(clippy::unwrap_used)]

mod fixture;

use cudarc::driver::{CudaContext, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;
use fixture::{Device, PTX, error, grid};
use sys::CUresult;
use tutti_emulated_programs::Gpus;

#[test]
fn saxpy_computes() {
    Gpus::new(1).run("saxpy_computes", |_| {
        let device = Device::open();
        let (n, a) = (1000_i32, 2.5_f32);
        let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let x = device.stream.clone_htod(&x).unwrap();
        let mut y = device.stream.alloc_zeros::<f32>(n as usize).unwrap();
        let kernel = device.kernel("saxpy");
        let mut launch = device.stream.launch_builder(&kernel);
        launch.arg(&a).arg(&x).arg(&mut y).arg(&n);
        // SAFETY: the arguments match the kernel's parameters.
        unsafe { launch.launch(grid(8, 128)) }.unwrap();
        let y = device.stream.clone_dtoh(&y).unwrap();
        assert!(y.iter().enumerate().all(|(i, y)| *y == a * i as f32), "{y:?}");
    });
}

#[test]
fn parameters_of_all_sizes_reach_the_kernel_at_their_offsets() {
    Gpus::new(1).run("parameters_of_all_sizes_reach_the_kernel_at_their_offsets", |_| {
        let device = Device::open();
        let kernel = device.kernel("mixed");
        let mut out = device.stream.alloc_zeros::<u64>(4).unwrap();
        let mut launch = device.stream.launch_builder(&kernel);
        launch.arg(&-3_i8).arg(&1.5_f32).arg(&-9_i16).arg(&0x0123_4567_89ab_cdef_u64).arg(&mut out);
        // SAFETY: the arguments match the kernel's parameters.
        unsafe { launch.launch(grid(1, 1)) }.unwrap();
        let out = device.stream.clone_dtoh(&out).unwrap();
        assert_eq!(out, [0xfd, u64::from(1.5_f32.to_bits()), 0xfff7, 0x0123_4567_89ab_cdef]);

        let function = raw_function(&device, "mixed");
        let info = |index| {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function's module stays loaded, and both results are valid for writes.
            let result = unsafe { sys::cuFuncGetParamInfo(function, index, &mut offset, &mut bytes) };
            (result, offset, bytes)
        };
        let expected = [(0, 1), (4, 4), (8, 2), (16, 8), (24, 8)];
        for (index, (offset, bytes)) in expected.into_iter().enumerate() {
            assert_eq!(info(index), (CUresult::CUDA_SUCCESS, offset, bytes), "parameter {index}");
        }
        assert_eq!(info(5).0, CUresult::CUDA_ERROR_INVALID_VALUE);
    });
}

/// Returns the driver's handle of a kernel, from a newly loaded module that is never unloaded.
fn raw_function(device: &Device, name: &str) -> sys::CUfunction {
    device.context.bind_to_thread().unwrap();
    let (ptx, name) = (std::ffi::CString::new(PTX).unwrap(), std::ffi::CString::new(name).unwrap());
    // SAFETY: the image is PTX with a zero byte at its end.
    unsafe {
        let module = result::module::load_data(ptx.as_ptr().cast()).unwrap();
        result::module::get_function(module, name).unwrap()
    }
}

#[test]
fn limits_of_a_launch_are_checked_at_the_call() {
    Gpus::new(1).run("limits_of_a_launch_are_checked_at_the_call", |_| {
        let device = Device::open();
        let mut x = device.stream.alloc_zeros::<f32>(1 << 14).unwrap();
        let bounded = device.kernel("bounded");
        for (blocks, threads, fits) in [(1, 64, true), (1, 65, false), (0, 32, false), (1, 0, false)] {
            let mut launch = device.stream.launch_builder(&bounded);
            launch.arg(&mut x);
            // SAFETY: the arguments match the kernel's parameters.
            let launched = unsafe { launch.launch(grid(blocks, threads)) };
            assert_eq!(launched.is_ok(), fits, "{blocks} blocks of {threads} threads: {launched:?}");
        }
        let reverse = device.kernel("reverse");
        let mut launch = |bytes: u32| {
            let n = (bytes / 4) as i32;
            let mut launch = device.stream.launch_builder(&reverse);
            launch.arg(&mut x).arg(&n);
            // SAFETY: the arguments match the kernel's parameters, and `x` is as long as the largest shared array.
            unsafe { launch.launch(cudarc::driver::LaunchConfig { shared_mem_bytes: bytes, ..grid(1, 256) }) }
        };
        launch(48 << 10).unwrap();
        assert_eq!(error(launch((48 << 10) + 4)), CUresult::CUDA_ERROR_INVALID_VALUE);
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        assert_eq!(error(reverse.set_attribute(limit, 228 << 10)), CUresult::CUDA_ERROR_INVALID_VALUE);
        reverse.set_attribute(limit, 64 << 10).unwrap();
        launch(64 << 10).unwrap();
        assert_eq!(error(launch((64 << 10) + 4)), CUresult::CUDA_ERROR_INVALID_VALUE);
        device.stream.synchronize().unwrap();
    });
}

#[test]
fn images_that_do_not_fit_are_refused() {
    Gpus::new(1).with("EMULATED_GPU_CAPABILITY", "8.0").run("images_that_do_not_fit_are_refused", |_| {
        let context = CudaContext::new(0).unwrap();
        let load = |ptx: &str| context.load_module(Ptx::from_src(ptx)).map(drop);
        load(PTX).unwrap();
        assert_eq!(error(load(&PTX.replace("sm_80", "sm_90"))), CUresult::CUDA_ERROR_INVALID_PTX);
        load(&PTX.replace("sm_80", "sm_75")).unwrap();
        load(&PTX.replace("sm_80", "sm_80a")).unwrap();
        assert_eq!(error(load(&PTX.replace("sm_80", "sm_75a"))), CUresult::CUDA_ERROR_INVALID_PTX);
        assert_eq!(error(load("no PTX")), CUresult::CUDA_ERROR_INVALID_PTX);
        let cubin = Ptx::from_binary(b"\x7fELF and so on\0".to_vec());
        assert_eq!(error(context.load_module(cubin)), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
        let module = context.load_module(Ptx::from_src(PTX)).unwrap();
        assert_eq!(error(module.load_function("saxpi")), CUresult::CUDA_ERROR_NOT_FOUND);
    });
}

#[test]
fn variables_of_a_module_begin_with_their_values() {
    Gpus::new(1).run("variables_of_a_module_begin_with_their_values", |_| {
        let device = Device::open();
        let count = device.kernel("count");
        // SAFETY: the kernel has no arguments.
        unsafe { device.stream.launch_builder(&count).launch(grid(3, 64)) }.unwrap();
        device.stream.synchronize().unwrap();
        let mut value = [0_u32];
        let name = std::ffi::CString::new("counter").unwrap();
        let function = raw_function(&device, "count");
        let mut module = std::ptr::null_mut();
        // SAFETY: the handles are valid, and the copy's target is as long as the variable.
        unsafe {
            assert_eq!(sys::cuFuncGetModule(&mut module, function), CUresult::CUDA_SUCCESS);
            let (address, bytes) = result::module::get_global(module, name).unwrap();
            assert_eq!(bytes, 4);
            result::memcpy_dtoh_sync(&mut value, address).unwrap();
        }
        assert_eq!(value, [7], "a module of its own has a variable of its own");
        let name = std::ffi::CString::new("counter").unwrap();
        let global = device.module().get_global(name.to_str().unwrap(), &device.stream).unwrap();
        let bytes = device.stream.clone_dtoh(&global).unwrap();
        assert_eq!(bytes, 10_u32.to_ne_bytes());
    });
}
