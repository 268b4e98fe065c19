//! All-reduce of two ranks in shared memory, beside what bounds it: a copy of as many bytes, and the round trip of a
//! flag between two threads. `cargo bench -p tutti-kernels --bench collectives`; one JSON line a figure.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench")]

use std::{
    hint::black_box,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use tutti_kernels::collective::{Collective, Seat, SharedMemory};

const WAIT: Duration = Duration::from_secs(60);
/// Many and short, so that on a machine with other work some of them are undisturbed.
const SAMPLES: usize = 300;

/// The median and the least of samples, in microseconds.
fn report(name: &str, bytes: usize, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let (median, least) = (samples[samples.len() / 2], samples[0]);
    let rate = |us: f64| bytes as f64 / us / 1e3;
    println!(
        "{}",
        json!({
            "bench": name, "bytes": bytes, "samples": samples.len(),
            "load_1m": load(), "median_us": median, "least_us": least, "median_gb_per_s": rate(median), "best_gb_per_s": rate(least),
        })
    );
}

/// How busy the machine is.
fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// Calls `act` often enough for a sample to be long against the clock; microseconds a call.
fn sampled(calls: usize, mut act: impl FnMut()) -> Vec<f64> {
    let mut sample = || {
        let began = Instant::now();
        (0..calls).for_each(|_| act());
        began.elapsed().as_secs_f64() * 1e6 / calls as f64
    };
    sample();
    (0..SAMPLES).map(|_| sample()).collect()
}

fn all_reduce(bytes: usize, calls: usize) -> Vec<f64> {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("group");
    let run = |rank| {
        let mut group = SharedMemory::meet(&path, Seat { rank, size: 2 }, WAIT, WAIT).unwrap();
        let mut data = vec![0.0f32; bytes / 4];
        sampled(calls, || group.all_reduce(black_box(&mut data)).unwrap())
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        let samples = run(0);
        other.join().unwrap();
        samples
    })
}

/// One thread copies.
fn copy(bytes: usize, calls: usize) -> Vec<f64> {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    sampled(calls, || black_box(&mut to[..]).copy_from_slice(black_box(&from)))
}

/// A flag there and another one back.
fn round_trip(calls: usize) -> Vec<f64> {
    #[repr(align(128))]
    struct Flag(AtomicU32);
    let (there, back) = (Flag(AtomicU32::new(0)), Flag(AtomicU32::new(0)));
    let trips = (calls * (SAMPLES + 1)) as u32;
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=trips {
                while there.0.load(Ordering::Acquire) != number {
                    std::hint::spin_loop();
                }
                back.0.store(number, Ordering::Release);
            }
        });
        let mut number = 0;
        sampled(calls, || {
            number += 1;
            there.0.store(number, Ordering::Release);
            while back.0.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
        })
    })
}

fn main() {
    report("flag_round_trip", 4, round_trip(500));
    for (bytes, calls) in [(8 << 10, 100), (8 << 20, 1)] {
        report("memcpy", bytes, copy(bytes, calls));
        report("all_reduce_2_ranks", bytes, all_reduce(bytes, calls));
    }
}
