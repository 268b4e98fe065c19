//! Tests the driver through the unmodified cudarc: devices, handles and memory.
#![allow(clippy::unwrap_used)]

mod fixture;

use cudarc::driver::{CudaContext, result, sys};
use fixture::{Device, error};
use sys::CUresult;
use tutti_emulated_programs::Gpus;

#[test]
fn devices_are_counted_named_and_told_apart() {
    let gpus = Gpus::new(4).with("CUDA_VISIBLE_DEVICES", "2,0").with("EMULATED_GPU_MEMORY", "64MiB");
    gpus.run("devices_are_counted_named_and_told_apart", |_| {
        assert_eq!(CudaContext::device_count(), Ok(2));
        let (first, second) = (CudaContext::new(0).unwrap(), CudaContext::new(1).unwrap());
        assert_eq!(first.name().unwrap(), "Tutti emulated GPU");
        assert_eq!(first.compute_capability(), Ok((9, 0)));
        let last_byte = |context: &CudaContext| context.uuid().unwrap().bytes[15];
        assert_eq!((last_byte(&first), last_byte(&second)), (2, 0));
        first.bind_to_thread().unwrap();
        assert_eq!(result::mem_get_info(), Ok((64 << 20, 64 << 20)));
        assert_eq!(error(CudaContext::new(2)), CUresult::CUDA_ERROR_INVALID_DEVICE);
    });
}

#[test]
fn without_devices_the_driver_says_so() {
    Gpus::new(0).run("without_devices_the_driver_says_so", |_| {
        assert_eq!(error(CudaContext::device_count()), CUresult::CUDA_ERROR_NO_DEVICE);
    });
}

#[test]
fn host_and_device_pointers_are_not_confused() {
    Gpus::new(1).run("host_and_device_pointers_are_not_confused", |_| {
        let device = Device::open();
        let host = vec![1_u8; 64];
        // SAFETY: the driver refuses a wrong pointer and does not use it.
        unsafe {
            let address = result::malloc_sync(64).unwrap();
            let as_host =
                std::slice::from_raw_parts(std::ptr::without_provenance::<u8>(address as usize), 64);
            let refused = [
                error(result::memcpy_htod_sync(host.as_ptr() as u64, &host)),
                error(result::memcpy_htod_sync(address, as_host)),
                error(result::memcpy_htod_sync(address + 1, &host)),
                error(result::memcpy_dtod_sync(address, host.as_ptr() as u64, 64)),
                error(result::memset_d8_sync(host.as_ptr() as u64, 0, 64)),
                error(result::free_sync(host.as_ptr() as u64)),
                error(result::free_sync(address + 16)),
                error(result::free_host(host.as_ptr() as *mut _)),
            ];
            assert_eq!(refused, [CUresult::CUDA_ERROR_INVALID_VALUE; 8]);
            result::memcpy_htod_sync(address, &host).unwrap();
            result::free_sync(address).unwrap();
            assert_eq!(
                error(result::free_sync(address)),
                CUresult::CUDA_ERROR_INVALID_VALUE,
                "a second free"
            );
            assert_eq!(error(result::memcpy_htod_sync(address, &host)), CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // A refused call leaves no sticky error.
        device.stream.synchronize().unwrap();
    });
}

#[test]
fn handles_that_are_gone_are_refused() {
    Gpus::new(1).run("handles_that_are_gone_are_refused", |_| {
        let device = Device::open();
        device.context.bind_to_thread().unwrap();
        // SAFETY: the driver looks handles up in a table and refuses stale ones.
        unsafe {
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
            result::stream::destroy(stream).unwrap();
            assert_eq!(error(result::stream::synchronize(stream)), CUresult::CUDA_ERROR_INVALID_HANDLE);
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
            result::event::destroy(event).unwrap();
            assert_eq!(error(result::event::query(event)), CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
    });
}

#[test]
fn memory_is_bounded_and_comes_back() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_MEMORY", "1MiB").with("EMULATED_GPU_SEED", 3);
    gpus.run("memory_is_bounded_and_comes_back", |_| {
        let device = Device::open();
        let free = || result::mem_get_info().unwrap().0;
        let at_start = free();
        // SAFETY: the test never reads the uninitialised memory.
        let first = unsafe { device.stream.alloc::<u8>(700_000) }.unwrap();
        assert_eq!(free(), at_start - 700_000);
        // SAFETY: the test never reads the uninitialised memory.
        let more = unsafe { device.stream.alloc::<u8>(700_000) };
        assert_eq!(error(more), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        // The free is enqueued in the stream, and the next allocation waits for the free.
        drop(first);
        // SAFETY: the test never reads the uninitialised memory.
        unsafe { device.stream.alloc::<u8>(700_000) }.unwrap();
    });
}

#[test]
fn the_export_table_is_an_error_code() {
    Gpus::new(1).run("the_export_table_is_an_error_code", |_| {
        let mut table = std::ptr::null();
        let id = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the result is valid for a write.
        let answer = unsafe { sys::cuGetExportTable(&mut table, &id) };
        assert_eq!((answer, table), (CUresult::CUDA_ERROR_NOT_FOUND, std::ptr::null()));
    });
}
