use super::*;

#[test]
fn percentiles_are_values_that_occurred() {
    let summary = Summary::of((1..=100).rev().map(f64::from).collect());
    assert_eq!((summary.p50, summary.p90, summary.p99, summary.max), (50.0, 90.0, 99.0, 100.0));
    let one = Summary::of(vec![7.0]);
    assert_eq!((one.p50, one.p99, one.mean), (7.0, 7.0, 7.0));
    assert_eq!(Summary::of(Vec::new()), Summary::default());
}
