use prometheus_client::{encoding::text::encode, metrics::histogram::Histogram, registry::Registry};

use super::*;

const BOUNDS: &[f64] = &[0.125, 0.5, 2.0];

/// The text of the metrics is that of the library's own histogram, for values on and between the bounds. The values are
/// sums of powers of two, so that both sums are exact.
#[test]
fn it_is_encoded_as_the_librarys_histogram() {
    let (own, theirs) = (LatencyHistogram::new(BOUNDS), Histogram::new(BOUNDS.iter().copied()));
    for ms in [0, 125, 250, 500, 750, 2000, 7000] {
        own.observe(Duration::from_millis(ms));
        theirs.observe(Duration::from_millis(ms).as_secs_f64());
    }
    assert_eq!(own.counts(), [2, 2, 2, 1]);
    let text = |register: &dyn Fn(&mut Registry)| {
        let (mut registry, mut text) = (Registry::default(), String::new());
        register(&mut registry);
        encode(&mut text, &registry).unwrap();
        text
    };
    let ours = text(&|registry| registry.register("wait_seconds", "Wait", own.clone()));
    assert_eq!(ours, text(&|registry| registry.register("wait_seconds", "Wait", theirs.clone())));
    assert!(ours.contains("wait_seconds_bucket{le=\"+Inf\"} 7"), "{ours}");
}
