use super::*;

fn certificate(year: i32, month: u8, day: u8) -> Vec<u8> {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(vec!["llm.example".into()]).unwrap();
    parameters.not_before = rcgen::date_time_ymd(1999, 1, 1);
    parameters.not_after = rcgen::date_time_ymd(year, month, day);
    parameters.self_signed(&key).unwrap().der().to_vec()
}

#[test]
fn the_end_of_a_certificate_is_read_in_both_forms_of_time() {
    // Expected values are from `date -u -d 2031-03-01 +%s`. Certificates give times after 2049 with a four-digit year.
    for (end, seconds) in [
        ((2031, 3, 1), 1_930_089_600),
        ((2032, 2, 29), 1_961_625_600),
        ((2049, 12, 31), 2_524_521_600),
        ((2100, 3, 1), 4_107_542_400),
    ] {
        assert_eq!(not_after(&certificate(end.0, end.1, end.2)), Some(seconds), "{end:?}");
    }
}

#[test]
fn other_bytes_are_no_certificate() {
    let whole = certificate(2031, 3, 1);
    for length in 0..whole.len().min(120) {
        assert_eq!(not_after(&whole[..length]), None);
    }
    assert_eq!(not_after(&[SEQUENCE, 0x85, 1, 1, 1, 1, 1]), None);
    assert_eq!(time(UTC_TIME, "310301000000"), None);
    assert_eq!(time(UTC_TIME, "311301000000Z"), None);
}
