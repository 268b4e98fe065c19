use super::*;

#[test]
fn the_memory_of_a_process_is_read_from_the_system() {
    let own = resident_bytes(std::process::id()).unwrap();
    assert!(own > 1 << 20 && own.is_multiple_of(1024), "{own}");
    // No process has the largest number.
    assert_eq!(resident_bytes(u32::MAX), None);
}
