use super::*;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn pages_between_live_blocks_return_to_the_system() {
    // Blocks that malloc takes from its heap, of which every hundredth stays and keeps the heap's end.
    let blocks: Vec<Vec<u8>> = (0..20_000).map(|_| vec![1; 8192]).collect();
    let full = resident();
    let kept: Vec<_> = blocks.into_iter().step_by(100).collect();
    let left = trimmed();
    assert!(left + (100 << 20) < full, "{left} of {full} bytes are left");
    drop(kept);
}
