use super::*;

fn of(value: &'static str) -> Option<Duration> {
    let mut metadata = MetadataMap::new();
    metadata.insert("grpc-timeout", value.parse().unwrap());
    deadline(&metadata)
}

#[test]
fn deadlines_are_read_in_every_unit() {
    assert_eq!(of("2H"), Some(Duration::from_secs(7200)));
    assert_eq!(of("1500m"), Some(Duration::from_millis(1500)));
    assert_eq!(of("99999999n"), Some(Duration::from_nanos(99_999_999)));
    assert_eq!(of("0m"), Some(Duration::ZERO));
    assert_eq!((of("123456789S"), of("S"), of("1x"), of("-1S")), (None, None, None, None));
}
