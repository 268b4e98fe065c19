use super::*;

#[test]
fn an_idle_process_is_searched_ever_more_seldom() {
    let mut idleness = Idleness::default();
    let searched: Vec<u32> = (1..=70).filter(|_| idleness.look(true)).collect();
    assert_eq!(searched, [1, 2, 4, 8, 16, 32, 64]);
    // Memory that a busy time makes free is searched for again, however often that was done before.
    assert!(!idleness.look(false));
    assert!(idleness.look(true) && idleness.look(true) && !idleness.look(true));
}

/// Bytes of the process in memory.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    1024 * line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn pages_between_live_blocks_return_to_the_system() {
    // Blocks that malloc takes from its heap, of which every hundredth stays and keeps the heap's end.
    let blocks: Vec<Vec<u8>> = (0..20_000).map(|_| vec![1; 8192]).collect();
    let full = resident();
    let kept: Vec<_> = blocks.into_iter().step_by(100).collect();
    trim();
    let left = resident();
    assert!(left + (100 << 20) < full, "{left} of {full} bytes are left");
    drop(kept);
}
