use std::sync::mpsc;

use super::*;

#[test]
fn the_thread_reads_until_nobody_asks() {
    let last = LastReading::default();
    assert_eq!(last.get(), None);
    let (asked, asks) = mpsc::channel();
    let mut used_bytes = 0;
    last.follow(move || {
        used_bytes += 1;
        // The receiver learns of the thread's end when this closure is dropped.
        asked.send(used_bytes).ok()?;
        Some(pb::DeviceMemory { used_bytes, total_bytes: 100 })
    });
    // The second reading begins after the first is stored.
    assert_eq!((asks.recv(), asks.recv()), (Ok(1), Ok(2)));
    let seen = last.get().unwrap();
    assert!(seen.used_bytes >= 1 && seen.total_bytes == 100, "{seen:?}");
    drop(last);
    while asks.recv().is_ok() {}
}

#[test]
fn a_device_that_is_gone_is_read_no_more() {
    let last = LastReading::default();
    let (asked, asks) = mpsc::channel();
    last.follow(move || {
        asked.send(()).ok()?;
        None
    });
    assert_eq!((asks.recv().is_ok(), asks.recv().is_err()), (true, true));
    assert_eq!(last.get(), None);
}

#[test]
fn the_memory_of_the_host_is_that_of_this_process() {
    let block = std::hint::black_box(vec![1_u8; 32 << 20]);
    let with = of_host().unwrap();
    assert!(with.used_bytes >= 32 << 20 && with.used_bytes < with.total_bytes, "{with:?}");
    drop(block);
}
