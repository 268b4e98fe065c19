use super::*;

const GIB: u64 = 1 << 30;

fn sizes(page_bytes: usize, slot_bytes: usize) -> Sizes {
    Sizes { page_tokens: 16, page_bytes, slot_bytes, running: 5, most_pages: 13 }
}

fn divide(sizes: &Sizes, budget: u64) -> KvSize {
    sizes.divide(budget, &EngineSettings::default()).unwrap()
}

#[test]
fn a_small_model_takes_only_what_it_can_use() {
    assert_eq!(sizes(1 << 20, 0).enough(), 13 << 20);
    // 13 pages, the null slot and 4 slots of running requests take 1 MiB each. Snapshots take at most a quarter of the
    // bytes of all pages.
    assert_eq!(sizes(1 << 20, 1 << 20).enough(), (13 << 20) + (5 << 20) + (13 << 18));
}

#[test]
fn a_large_model_takes_what_its_share_of_the_machine_leaves() {
    // Two workers divide 64 GiB. This worker's weights and largest step take 8 GiB.
    assert_eq!(default_bytes(Some(32 * GIB), 8 * GIB, Some(56 * GIB)), 20 * GIB);
    // This worker has no share of its own, and 16 GiB of the machine are free.
    assert_eq!(default_bytes(None, 8 * GIB, Some(16 * GIB)), 14 * GIB);
    // Other processes have taken memory since the conductor measured.
    assert_eq!(default_bytes(Some(32 * GIB), 8 * GIB, Some(8 * GIB)), 7 * GIB);
}

#[test]
fn the_workers_of_a_machine_take_no_more_than_it_has() {
    for workers in [1, 2, 3, 8] {
        let (free, weights) = (64 * GIB, 3 * GIB);
        let each = default_bytes(Some(free / workers), weights, Some(free - workers * weights));
        assert!(workers * (weights + each) <= free, "{workers} workers take {each} each");
        assert!(
            workers * (weights + each) > free / 8 * 7 - 8 * workers,
            "{workers} workers take {each} each"
        );
    }
}

#[test]
fn a_worker_whose_weights_fill_its_share_still_takes_a_little_of_what_is_free() {
    assert_eq!(default_bytes(Some(16 * GIB), 16 * GIB, Some(8 * GIB)), GIB);
    assert_eq!(default_bytes(Some(16 * GIB), 16 * GIB, Some(64 * GIB)), DEFAULT_KV_BYTES);
    assert_eq!(default_bytes(None, 0, None), DEFAULT_KV_BYTES);
}

#[test]
fn a_model_without_slot_planes_has_pages_alone() {
    let size = divide(&sizes(100, 0), 1050);
    assert_eq!((size.pages, size.slots, size.bytes()), (10, 5, 1000));
    assert_eq!(size.tokens(), 9 * 16);
}

#[test]
fn pages_and_slots_come_out_of_one_budget() {
    // The null slot and 4 running requests take 5 slots of 10 bytes. Snapshots take a quarter of the other 1,000 bytes,
    // which is 25 slots.
    let size = divide(&Sizes { most_pages: 1000, ..sizes(5, 10) }, 1050);
    assert_eq!((size.pages, size.slots), (150, 30));
    assert_eq!(size.bytes(), 1050);
    let without_cache = EngineSettings { no_prefix_cache: true, ..EngineSettings::default() };
    let size = sizes(5, 10).divide(1050, &without_cache).unwrap();
    assert_eq!((size.pages, size.slots), (200, 5));
    // Pages that take no memory do not limit requests. There are as many pages as requests can use.
    let size = divide(&sizes(0, 10), 1050);
    assert_eq!((size.pages, size.slots), (13, 5 + 13));
}

#[test]
fn a_budget_for_less_than_two_pages_and_all_running_requests_is_refused() {
    let asked = EngineSettings { max_running_requests: Some(4), ..EngineSettings::default() };
    for (sizes, budget, field, expected) in [
        (
            sizes(100, 0),
            199,
            "kv_cache_memory",
            "199 bytes are 1 pages of 100 bytes, but at least 2 are needed",
        ),
        (
            sizes(100, 10),
            249,
            "max_running_requests",
            "is 4, the limit is 3: kv_cache_memory, 249 bytes, holds 4 slots of 10 bytes",
        ),
        // The budget is too small for one request.
        (
            sizes(100, 10),
            219,
            "kv_cache_memory",
            "219 bytes are 1 pages of 100 bytes besides 5 slots of 10 bytes",
        ),
        (sizes(100, usize::MAX / 2), u64::MAX - 1, "kv_cache_memory", "0 pages"),
    ] {
        let refused = sizes.divide(budget, &asked).unwrap_err();
        assert_eq!(refused.field(), Some(field), "{refused}");
        assert!(refused.to_string().contains(expected), "{refused}");
    }
}

/// Slots take at most half of the budget if `max_running_requests` is not set.
#[test]
fn as_many_requests_run_as_have_slots_unless_their_number_is_set() {
    let sizes = Sizes { running: 1 + 128, most_pages: 1000, ..sizes(5, 10) };
    let run =
        |budget| sizes.divide(budget, &EngineSettings::default()).map(|size| (size.running, size.bytes()));
    assert_eq!(run(10_000), Ok((128, 10_000)));
    assert_eq!(run(1000), Ok((49, 1000)));
    // The minimum is one request and two pages.
    assert_eq!(run(30), Ok((1, 30)));
    let refused = run(29).unwrap_err();
    assert_eq!(refused.field(), Some("kv_cache_memory"), "{refused}");
    // If `max_running_requests` is set, the value is kept even if its slots take more than half of the budget.
    let set =
        EngineSettings { max_running_requests: Some(80), no_prefix_cache: true, ..EngineSettings::default() };
    let size = Sizes { running: 1 + 80, ..sizes }.divide(1000, &set).unwrap();
    assert_eq!((size.running, size.slots, size.pages), (80, 81, 38));
}
