use super::*;

#[test]
fn free_memory_of_the_machine_is_read_in_bytes() {
    assert_eq!(machine_bytes("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
    assert_eq!(machine_bytes("MemTotal: 9 kB\n"), None);
    assert_eq!(machine_bytes("MemAvailable: 99999999999999999999 kB\n"), None);
    assert_eq!(machine_bytes("MemAvailable: 18446744073709551615 kB\n"), None);
}

#[test]
fn cached_files_of_a_control_group_can_be_freed() {
    assert_eq!(reclaimable_bytes("anon 5\ninactive_file 4096\nactive_file 9\n"), 4096);
    assert_eq!(reclaimable_bytes("anon 5\n"), 0);
}
