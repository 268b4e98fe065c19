use super::*;

#[test]
fn units_are_told_apart() {
    for (text, bytes) in
        [("512MiB", 512 << 20), ("2GB", 2_000_000_000), ("2 gib", 2 << 30), ("77", 77), ("5B", 5)]
    {
        assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
    }
}

#[test]
fn what_is_no_size_is_refused() {
    for text in ["", "MiB", "1.5GiB", "-1", "12XB", "99999999999TiB"] {
        assert!(text.parse::<ByteSize>().is_err(), "{text}");
    }
}

#[test]
fn writing_and_reading_are_inverse() {
    for bytes in [0, 1, 1000, 1024, 512 << 20, 1_500_000, (1 << 30) + 1] {
        let text = serde_json::to_string(&ByteSize(bytes)).unwrap();
        assert_eq!(serde_json::from_str::<ByteSize>(&text).unwrap(), ByteSize(bytes), "{text}");
    }
    assert_eq!(serde_json::from_str::<ByteSize>("4096").unwrap(), ByteSize(4096));
}
