use prometheus_client::metrics::{counter::Counter, exemplar::HistogramWithExemplars};

use super::*;

#[test]
fn exemplars_are_in_one_text_only() {
    let metrics = Metrics::default();
    let histogram = HistogramWithExemplars::<[(&str, &str); 1]>::new([0.5, 1.0].into_iter());
    metrics.register(|registry| registry.register("requests", "Requests", Counter::<u64>::default()));
    metrics.register_conventional(|registry| registry.register("gen_ai_time", "Time", histogram.clone()));
    let before = metrics.encode();
    assert_eq!(before, metrics.encode_with_exemplars());
    histogram.observe(0.7, Some([("trace_id", "abc")]), None);
    let (plain, whole) = (metrics.encode(), metrics.encode_with_exemplars());
    assert!(whole.contains("gen_ai_time_bucket{le=\"1.0\"} 1 # {trace_id="), "{whole}");
    assert!(plain.contains("gen_ai_time_bucket{le=\"1.0\"} 1\n") && !plain.contains("trace_id"), "{plain}");
    assert_eq!(plain.lines().count(), before.lines().count());
    assert!(plain.contains("tutti_requests_total 0\n") && plain.ends_with("# EOF\n"), "{plain}");
}
