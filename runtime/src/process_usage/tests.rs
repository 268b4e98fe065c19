use super::*;

#[test]
fn a_process_knows_what_it_has() {
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64;
    let usage = read();
    assert!(usage.resident_bytes.unwrap() > 1 << 20, "{usage:?}");
    assert!(
        usage.open_descriptors.unwrap() >= 3 && usage.open_descriptors <= usage.max_descriptors,
        "{usage:?}"
    );
    let started = usage.started_us.unwrap();
    // The test's process is younger than a day. Ticks are rounded down.
    assert!(started <= before && before - started < 86_400_000_000, "{usage:?}");
    let file = fs::File::open("/proc/self/status").unwrap();
    assert!(read().cpu_us.unwrap() > 0 && read().open_descriptors.unwrap() > 0);
    drop(file);
}

#[test]
fn names_with_parentheses_do_not_shift_the_fields() {
    let fields: Vec<String> = (3..=30).map(|field| field.to_string()).collect();
    assert_eq!(start_ticks(&format!("7 (a) b (c)) {}", fields.join(" "))), Some(22));
    assert_eq!(start_ticks("7 (a) S 1"), None);
}
