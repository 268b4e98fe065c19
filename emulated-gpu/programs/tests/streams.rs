//! Tests streams and events: the order that CUDA requires, work that runs late, and the orders that a seed may change.
#![allow(clippy::unwrap_used)]

mod fixture;

use cudarc::driver::{DevicePtr, PushKernelArg, result, sys};
use fixture::{Device, error, grid};
use sys::CUresult;
use tutti_emulated_programs::Gpus;

const SEEDS: [u64; 3] = [1, 2, 3];

/// Runs a test's body without a seed and with each of [`SEEDS`], each time in a new process.
fn for_all_orders(test: &str, body: impl Fn()) {
    Gpus::new(1).run(test, |_| body());
    for seed in SEEDS {
        Gpus::new(1).with("EMULATED_GPU_SEED", seed).run(test, |_| body());
    }
}

#[test]
fn pinned_copies_and_launches_of_a_stream_keep_their_order() {
    for_all_orders("pinned_copies_and_launches_of_a_stream_keep_their_order", || {
        let device = Device::open();
        // SAFETY: both ranges are written before they are read.
        let (mut to, mut from) = unsafe {
            (
                device.context.alloc_pinned::<f32>(256).unwrap(),
                device.context.alloc_pinned::<f32>(256).unwrap(),
            )
        };
        let x = device.stream.clone_htod(&[1.0_f32; 256]).unwrap();
        let mut y = device.stream.alloc_zeros::<f32>(256).unwrap();
        let (kernel, a, n) = (device.kernel("saxpy"), 3.0_f32, 256_i32);
        for round in 0..4 {
            to.as_mut_slice().unwrap().fill(round as f32);
            device.stream.memcpy_htod(&to, &mut y).unwrap();
            for _ in 0..3 {
                let mut launch = device.stream.launch_builder(&kernel);
                launch.arg(&a).arg(&x).arg(&mut y).arg(&n);
                // SAFETY: the arguments match the kernel's parameters.
                unsafe { launch.launch(grid(2, 128)) }.unwrap();
            }
            device.stream.memcpy_dtoh(&y, &mut from).unwrap();
            let expected = round as f32 + 9.0;
            assert!(from.as_slice().unwrap().iter().all(|y| *y == expected), "round {round}");
        }
    });
}

#[test]
fn work_is_late_until_the_host_waits() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_SEED", 1).with("EMULATED_GPU_PATIENCE", 3_600_000);
    gpus.run("work_is_late_until_the_host_waits", |_| {
        let device = Device::open();
        device.context.bind_to_thread().unwrap();
        let stream = device.stream.cu_stream();
        // SAFETY: the pinned ranges and the device range have 4 words and are freed at the end.
        unsafe {
            let pinned = |fill: u32| {
                let words = result::malloc_host(16, 0).unwrap().cast::<u32>();
                std::slice::from_raw_parts_mut(words, 4).fill(fill);
                words
            };
            let (source, target) = (pinned(1), pinned(0));
            let address = result::malloc_sync(16).unwrap();
            result::memcpy_htod_async(address, std::slice::from_raw_parts(source, 4), stream).unwrap();
            // The copy has not run yet, so it will read the new content of the staging buffer.
            source.write_volatile(2);
            result::memcpy_dtoh_async(std::slice::from_raw_parts_mut(target, 4), address, stream).unwrap();
            assert_eq!(target.read_volatile(), 0, "the copy has not run");
            assert_eq!(sys::cuStreamQuery(stream), CUresult::CUDA_ERROR_NOT_READY);
            result::stream::synchronize(stream).unwrap();
            assert_eq!(std::slice::from_raw_parts(target, 4), [2, 1, 1, 1]);

            // Pageable memory is read during the call.
            let mut pageable = [5_u32; 4];
            result::memcpy_htod_async(address, &pageable, stream).unwrap();
            pageable.fill(6);
            let mut back = [0_u32; 4];
            result::memcpy_dtoh_async(&mut back, address, stream).unwrap();
            assert_eq!(back, [5; 4]);
        }
    });
}

#[test]
fn an_event_orders_two_streams() {
    for_all_orders("an_event_orders_two_streams", || {
        let device = Device::open();
        // SAFETY: the test orders its streams by events.
        unsafe { device.context.disable_event_tracking() };
        let (first, second) = (device.context.new_stream().unwrap(), device.context.new_stream().unwrap());
        let log = first.alloc_zeros::<u32>(64).unwrap();
        let append = device.kernel("append");
        first.synchronize().unwrap();
        for turn in 0..10_u32 {
            let (stream, other) = if turn % 2 == 0 { (&first, &second) } else { (&second, &first) };
            let mut launch = stream.launch_builder(&append);
            launch.arg(&log).arg(&turn);
            // SAFETY: the arguments match the kernel's parameters.
            unsafe { launch.launch(grid(1, 1)) }.unwrap();
            let event = stream.record_event(None).unwrap();
            other.wait(&event).unwrap();
        }
        first.synchronize().unwrap();
        second.synchronize().unwrap();
        let log = first.clone_dtoh(&log).unwrap();
        assert_eq!(log[..11], [10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    });
}

#[test]
fn seeds_draw_the_order_of_streams_that_nothing_orders() {
    let order = |seed: u64| {
        let test = "seeds_draw_the_order_of_streams_that_nothing_orders";
        let gpus = Gpus::new(1).with("EMULATED_GPU_SEED", seed).with("EMULATED_GPU_PATIENCE", 3_600_000);
        let text = gpus.run(test, |_| {
            let device = Device::open();
            // SAFETY: the test accepts any order of the streams.
            unsafe { device.context.disable_event_tracking() };
            let streams: Vec<_> = (0..8).map(|_| device.context.new_stream().unwrap()).collect();
            let log = device.stream.alloc_zeros::<u32>(64).unwrap();
            device.stream.synchronize().unwrap();
            let append = device.kernel("append");
            for (value, stream) in (0..8_u32).zip(&streams) {
                let mut launch = stream.launch_builder(&append);
                launch.arg(&log).arg(&value);
                // SAFETY: the arguments match the kernel's parameters.
                unsafe { launch.launch(grid(1, 1)) }.unwrap();
            }
            device.context.synchronize().unwrap();
            let log = device.stream.clone_dtoh(&log).unwrap();
            println!("order {:?} end", &log[1..9]);
            let mut sorted = log[1..9].to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6, 7]);
        });
        let from = text.find("order ").unwrap();
        text[from..].split(" end").next().unwrap().to_owned()
    };
    let orders: Vec<String> = SEEDS.into_iter().map(order).collect();
    assert!(orders.iter().any(|other| *other != orders[0]), "all seeds gave {}", orders[0]);
    assert_eq!(order(SEEDS[0]), orders[0], "a seed gives its order again");
}

#[test]
fn events_have_times_and_answer_queries() {
    Gpus::new(1).run("events_have_times_and_answer_queries", |_| {
        let device = Device::open();
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = device.stream.record_event(timed).unwrap();
        let end = device.stream.record_event(timed).unwrap();
        assert!(start.elapsed_ms(&end).unwrap() >= 0.0);
        assert!(end.is_complete());
        let untimed = device.stream.record_event(None).unwrap();
        assert_eq!(error(start.elapsed_ms(&untimed)), CUresult::CUDA_ERROR_INVALID_HANDLE);
    });
}

#[test]
fn memory_freed_in_one_stream_is_not_read_in_another() {
    Gpus::new(1).run("memory_freed_in_one_stream_is_not_read_in_another", |_| {
        let device = Device::open();
        // SAFETY: this test checks two streams without an order on purpose.
        unsafe { device.context.disable_event_tracking() };
        let (from, to) =
            (device.stream.clone_htod(&[1_u32]).unwrap(), device.stream.alloc_zeros::<u32>(1).unwrap());
        let address = from.device_ptr(&device.stream).0;
        drop(from);
        device.stream.synchronize().unwrap();
        let other = device.context.new_stream().unwrap();
        let copy = device.kernel("copy_word");
        let mut launch = other.launch_builder(&copy);
        launch.arg(&to).arg(&address);
        // SAFETY: the emulator reports the freed address and does not access it.
        unsafe { launch.launch(grid(1, 1)) }.unwrap();
        assert_eq!(error(other.synchronize()), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
}
