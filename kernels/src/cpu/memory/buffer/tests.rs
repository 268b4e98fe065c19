use super::*;

/// Resident bytes of the mapping that holds an address.
fn resident(address: usize) -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines();
    let holds = |line: &str| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let bound = |text| usize::from_str_radix(text, 16).ok();
        range.is_some_and(|(first, end)| {
            bound(first).zip(bound(end)).is_some_and(|(first, end)| (first..end).contains(&address))
        })
    };
    lines.find(|line| holds(line)).expect("no mapping");
    let rss = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn a_buffer_becomes_resident_as_a_whole_and_stays_zero() {
    for threads in [1, 3] {
        let mut pool = ThreadPool::new(threads).unwrap();
        let len = 2 * RESIDENT_AT_ONCE + 5000;
        let mut buffer = Buffer::<u8>::zeroed(len, "a test").unwrap();
        let address = buffer.as_ptr().addr();
        assert!(resident(address) < len);
        buffer.make_resident(&mut pool, "a test").unwrap();
        assert!(resident(address) >= len);
        assert!([0, RESIDENT_AT_ONCE, len - 1].iter().all(|&index| buffer[index] == 0));
    }
}
