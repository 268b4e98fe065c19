//! Tests faults that programs cause, and faults on demand (`EMULATED_GPU_FAULTS`).
#![allow(clippy::unwrap_used)]

mod fixture;

use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, PushKernelArg, sys};
use fixture::{Device, error, grid};
use sys::CUresult;
use tutti_emulated_programs::Gpus;

/// Launches `saxpy` over one block.
fn saxpy(device: &Device) -> Result<(), cudarc::driver::DriverError> {
    let kernel = device.kernel("saxpy");
    let x = device.stream.clone_htod(&[1.0_f32; 32])?;
    let mut y = device.stream.alloc_zeros::<f32>(32)?;
    let mut launch = device.stream.launch_builder(&kernel);
    launch.arg(&1.0_f32).arg(&x).arg(&mut y).arg(&32_i32);
    // SAFETY: the arguments match the kernel's parameters.
    unsafe { launch.launch(grid(1, 32)) }?;
    assert_eq!(device.stream.clone_dtoh(&y)?, [1.0; 32]);
    Ok(())
}

/// Checks the result of a launch whose kernel fails with `failure`. The launch may return this error, too. cudarc
/// records events after a launch, and the driver refuses them once the kernel has failed.
fn launched<T>(result: Result<T, cudarc::driver::DriverError>, failure: CUresult) {
    if let Err(error) = result {
        assert_eq!(error.0, failure);
    }
}

#[test]
fn a_store_out_of_bounds_is_a_sticky_illegal_address() {
    let report = Gpus::new(1).run("a_store_out_of_bounds_is_a_sticky_illegal_address", |_| {
        let device = Device::open();
        let mut y = device.stream.alloc_zeros::<f32>(32).unwrap();
        let kernel = device.kernel("store_behind");
        let mut launch = device.stream.launch_builder(&kernel);
        launch.arg(&mut y).arg(&32_i32);
        // SAFETY: the emulator reports the store past the end and does not execute it.
        launched(unsafe { launch.launch(grid(1, 64)) }, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(device.stream.synchronize()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(device.stream.clone_dtoh(&y)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(device.stream.alloc_zeros::<f32>(1)), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(error(device.context.new_stream()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    assert!(report.contains("store_behind") && report.contains("kernels.cu:9"), "{report}");
    assert!(report.contains("thread (32, 0, 0)"), "{report}");
}

#[test]
fn a_misaligned_store_is_named() {
    Gpus::new(1).run("a_misaligned_store_is_named", |_| {
        let device = Device::open();
        let mut y = device.stream.alloc_zeros::<u8>(32).unwrap();
        let kernel = device.kernel("store_misaligned");
        let mut launch = device.stream.launch_builder(&kernel);
        launch.arg(&mut y);
        // SAFETY: the emulator reports the misaligned store and does not execute it.
        launched(unsafe { launch.launch(grid(1, 1)) }, CUresult::CUDA_ERROR_MISALIGNED_ADDRESS);
        assert_eq!(error(device.stream.synchronize()), CUresult::CUDA_ERROR_MISALIGNED_ADDRESS);
    });
}

#[test]
fn an_error_ends_with_its_context() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_FAULTS", "fail kernel=saxpy");
    gpus.run("an_error_ends_with_its_context", |_| {
        let device = Device::open();
        assert_eq!(error(saxpy(&device)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        drop(device);
        saxpy(&Device::open()).unwrap();
    });
}

#[test]
fn the_named_launch_fails() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_FAULTS", "fail kernel=saxpy at=3; fail kernel=other");
    let report = gpus.run("the_named_launch_fails", |_| {
        let device = Device::open();
        saxpy(&device).unwrap();
        saxpy(&device).unwrap();
        assert_eq!(error(saxpy(&device)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    });
    assert!(report.contains("kernel saxpy: fails on demand"), "{report}");
}

#[test]
fn memory_that_fails_is_a_sticky_error() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_FAULTS", "break at=2");
    gpus.run("memory_that_fails_is_a_sticky_error", |_| {
        let device = Device::open();
        saxpy(&device).unwrap();
        assert_eq!(error(saxpy(&device)), CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
        assert_eq!(error(device.context.new_stream()), CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
    });
}

#[test]
fn a_kernel_writes_pinned_memory_that_is_mapped() {
    use cudarc::driver::result::{free_host, malloc_host};
    // With this fault, the kernel runs to its end and then fails. The host can still read mapped memory after the
    // failure.
    let gpus = Gpus::new(1).with("EMULATED_GPU_FAULTS", "fail kernel=saxpy");
    gpus.run("a_kernel_writes_pinned_memory_that_is_mapped", |_| {
        let device = Device::open();
        let kernel = device.kernel("saxpy");
        let x = device.stream.clone_htod(&[3.0_f32; 32]).unwrap();
        // SAFETY: the memory is written before it is read, and the kernel stays inside it.
        unsafe {
            let host = malloc_host(32 * 4, sys::CU_MEMHOSTALLOC_DEVICEMAP).unwrap();
            std::slice::from_raw_parts_mut(host.cast::<f32>(), 32).fill(1.0);
            let (mut y, mut inside) = (0, 0);
            let asked =
                |address: &mut u64, place| sys::cuMemHostGetDevicePointer_v2(address, place, 0).result();
            asked(&mut y, host).unwrap();
            asked(&mut inside, host.byte_add(8)).unwrap();
            assert_eq!(inside, y + 8);
            assert_eq!(error(asked(&mut inside, host.byte_add(32 * 4))), CUresult::CUDA_ERROR_INVALID_VALUE);
            let mut launch = device.stream.launch_builder(&kernel);
            launch.arg(&2.0_f32).arg(&x).arg(&y).arg(&32_i32);
            launched(launch.launch(grid(1, 32)), CUresult::CUDA_ERROR_LAUNCH_FAILED);
            assert_eq!(error(device.stream.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED);
            assert_eq!(std::slice::from_raw_parts(host.cast::<f32>(), 32), [7.0; 32]);
            free_host(host).unwrap();
        }
        let plain = device.stream.context().default_stream();
        assert_eq!(error(plain.synchronize()), CUresult::CUDA_ERROR_LAUNCH_FAILED, "the error stays");
    });
}

#[test]
fn a_refused_launch_leaves_the_context_whole() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_FAULTS", "refuse at=2");
    gpus.run("a_refused_launch_leaves_the_context_whole", |_| {
        let device = Device::open();
        saxpy(&device).unwrap();
        assert_eq!(error(saxpy(&device)), CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        saxpy(&device).unwrap();
    });
}

#[test]
fn the_nth_allocation_finds_no_memory() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_FAULTS", "out-of-memory at=2");
    gpus.run("the_nth_allocation_finds_no_memory", |_| {
        let device = Device::open();
        let allocate = || device.stream.alloc_zeros::<u8>(16);
        let _first = allocate().unwrap();
        assert_eq!(error(allocate()), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        allocate().unwrap();
    });
}

#[test]
fn a_device_that_stops_answering_stays_silent_and_others_go_on() {
    let gpus = Gpus::new(2).with("EMULATED_GPU_FAULTS", "hang device=1");
    gpus.run("a_device_that_stops_answering_stays_silent_and_others_go_on", |process| {
        let other = CudaContext::new(1).unwrap();
        let stream = other.new_stream().unwrap();
        let module = other.load_module(cudarc::nvrtc::Ptx::from_src(fixture::PTX)).unwrap();
        let count = module.load_function("count").unwrap();
        // SAFETY: the kernel has no arguments.
        unsafe { stream.launch_builder(&count).launch(grid(1, 32)) }.unwrap();
        let event = stream.record_event(None).unwrap();
        saxpy(&Device::open()).unwrap();
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_millis(100) {
            assert!(!event.is_complete());
        }
        // A drop of the module would wait for ever for the device, which hangs.
        process.end();
    });
}
