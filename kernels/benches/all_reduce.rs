//! All-reduce of two ranks in shared memory, and two lower bounds of its time: a copy of as many bytes, and the round
//! trip of a flag between two threads. `cargo bench -p tutti-kernels --bench all_reduce` prints the times and the
//! machine as JSON.

#![allow(clippy::unwrap_used, reason = "a bench")]

use std::{
    hint::black_box,
    process::ExitCode,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use serde_json::{Map, Value, json};
use tutti_kernels::collective::{Collective, GroupRank, SharedMemory};
use tutti_measure::results::{self, Origin};

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    output: results::Output,
}

const WAIT: Duration = Duration::from_secs(60);
/// Samples per figure. They are many and short, so that some are undisturbed on a busy machine.
const SAMPLES: usize = 300;

/// Median and minimum of samples.
struct Times {
    median_us: f64,
    least_us: f64,
}

impl Times {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Self { median_us: samples[samples.len() / 2], least_us: samples[0] }
    }

    /// Returns the times as JSON. `bytes` is the number of bytes that one call moves, if the figure is a rate.
    fn json(&self, bytes: Option<usize>) -> Value {
        let Self { median_us, least_us } = self;
        let rate = |us: f64| bytes.map(|bytes| bytes as f64 / us / 1e3);
        json!({ "median_us": median_us, "least_us": least_us, "median_gb_per_s": rate(*median_us) })
    }
}

/// Returns samples in microseconds per call. Each sample calls `act` often enough to be long relative to the clock.
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
        let mut group = SharedMemory::meet(&path, GroupRank { rank, world_size: 2 }, WAIT, WAIT).unwrap();
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

/// Times a copy by one thread.
fn copy(bytes: usize, calls: usize) -> Vec<f64> {
    let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
    sampled(calls, || black_box(&mut to[..]).copy_from_slice(black_box(&from)))
}

/// Times the round trip of a flag between two threads.
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

fn main() -> ExitCode {
    let args = Args::parse();
    let origin = Origin::of("cargo bench -p tutti-kernels --bench all_reduce");
    let flag = Times::of(round_trip(500));
    let mut sizes = Map::new();
    for (name, bytes, calls) in [("8 KiB", 8 << 10, 100), ("8 MiB", 8 << 20, 1)] {
        let (copy, sum) = (Times::of(copy(bytes, calls)), Times::of(all_reduce(bytes, calls)));
        let over = sum.median_us / copy.median_us;
        let size = json!({
            "all_reduce": sum.json(Some(bytes)),
            "copy_by_one_thread": copy.json(Some(bytes)),
            "all_reduce_over_copy": over,
            "all_reduce_over_flag": sum.median_us / flag.median_us,
        });
        sizes.insert(name.to_owned(), size);
    }
    let figures = json!({ "samples": SAMPLES, "flag_there_and_back": flag.json(None), "sizes": sizes });
    results::exit("all_reduce", results::write(&origin, figures, &args.output))
}
