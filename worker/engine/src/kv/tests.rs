use super::*;

fn bytes(max_context_tokens: usize, available: Option<u64>) -> u64 {
    let limits = Limits {
        vocab_size: 8,
        max_context_tokens,
        eos_token_ids: vec![],
        max_step_tokens: 8,
        steps_in_flight: 1,
    };
    let settings = EngineSettings { max_running_requests: 4, ..EngineSettings::default() };
    default_bytes(16, 1 << 20, &limits, &settings, available)
}

#[test]
fn a_small_model_takes_only_what_it_can_use() {
    assert_eq!(bytes(40, None), 13 << 20, "three pages for each of four requests, and the null page");
}

#[test]
fn a_large_model_takes_the_smallest_of_the_bounds() {
    assert_eq!(bytes(1 << 20, None), DEFAULT_KV_BYTES);
    assert_eq!(bytes(1 << 20, Some(8 << 30)), 1 << 30);
}

#[test]
fn available_memory_is_read_in_bytes() {
    assert_eq!(mem_available("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
    assert_eq!(mem_available("MemTotal: 9 kB\n"), None);
}
