use tutti_settings::DeviceChoice;

use super::*;
use crate::device::tests::settings;

const GIB: u64 = 1 << 30;

fn rank() -> Footprint {
    Footprint { weight_bytes: 8 * GIB, page_bytes: 1 << 20, ..Footprint::default() }
}

#[test]
fn the_memory_of_all_workers_adds_up() {
    let (mut need, settings) = (Need::default(), settings(DeviceChoice::Cpu));
    need.add(&rank(), &settings, 1);
    assert_eq!(need.bytes(), 8 * GIB + (2 << 20));
    need.add(&rank(), &settings, 2);
    assert_eq!(need.bytes(), 3 * (8 * GIB + (2 << 20)));
}

#[test]
fn planes_hold_two_pages_and_the_slots_that_are_asked_for() {
    let with_slots = Footprint { slot_bytes: 1 << 20, ..rank() };
    let planes = |settings: &WorkerSettings| {
        let mut need = Need::default();
        need.add(&with_slots, settings, 1);
        need.bytes() - 8 * GIB
    };
    let mut settings = settings(DeviceChoice::Cpu);
    assert_eq!(planes(&settings), (2 + 2) << 20);
    settings.engine.max_running_requests = Some(10);
    assert_eq!(planes(&settings), (2 + 11) << 20);
    settings.engine.max_step_tokens = 4;
    assert_eq!(planes(&settings), (2 + 5) << 20, "a step runs no more requests than it has tokens");
}

#[test]
fn mapped_weights_need_no_memory() {
    let mut settings = settings(DeviceChoice::Cpu);
    settings.weights.packed_weights = Some("/packed".into());
    let mut need = Need::default();
    need.add(&rank(), &settings, 1);
    assert_eq!(need.bytes(), 2 << 20);
}

#[test]
fn a_refusal_has_the_figures_and_what_helps() {
    let mut settings = settings(DeviceChoice::Cpu);
    let error = |settings: &WorkerSettings, workers, memory| {
        let mut need = Need::default();
        need.add(&rank(), settings, workers);
        need.refused("6.0 GiB are free on this machine", memory)
    };
    let host = MemoryKind::Host { total: 7 << 30 };
    let refused = |settings: &WorkerSettings, workers, memory| error(settings, workers, memory).to_string();
    assert_eq!(
        refused(&settings, 1, host),
        "model: the weights take 8.0 GiB and the smallest planes 2.0 MiB, but 6.0 GiB are free on this machine: take \
         --quantize int8 or int4, more memory or a smaller model"
    );
    let several = refused(&settings, 2, host);
    assert!(several.contains("of 2 workers take 16.0 GiB") && several.contains("--workers"), "{several}");
    settings.weights.quantize = Quantize::Int8;
    assert!(!refused(&settings, 1, host).contains("--quantize"));
    settings.weights.quantize = Quantize::None;
    let on_gpu = refused(&settings, 1, MemoryKind::Device);
    assert!(on_gpu.contains("--quantize") && on_gpu.contains("--tp"), "{on_gpu}");
    // Memory that others hold now may be free at the next start.
    let kind = |memory| error(&settings, 1, memory).kind();
    assert_eq!(kind(host), ErrorKind::InvalidArgument);
    assert_eq!(kind(MemoryKind::Host { total: 12 << 30 }), ErrorKind::Internal);
    assert_eq!(kind(MemoryKind::Device), ErrorKind::Internal);
}
