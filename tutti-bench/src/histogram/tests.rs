use super::*;
use crate::random::Draw;

fn of(values: impl IntoIterator<Item = u64>) -> Histogram {
    let mut histogram = Histogram::default();
    values.into_iter().for_each(|value| histogram.record(Duration::from_micros(value)));
    histogram
}

#[test]
fn buckets_follow_each_other_without_gaps() {
    let mut next = 0;
    for bucket in 0..BUCKETS {
        let (low, width) = bounds(bucket);
        assert_eq!(low, next, "bucket {bucket}");
        assert_eq!((index(low), index(low + width - 1)), (bucket, bucket), "values of bucket {bucket}");
        next = low + width;
    }
    assert_eq!(next, 1 << MAX_BITS);
}

#[test]
fn a_bucket_is_at_most_an_128th_of_its_values_wide() {
    for bucket in EXACT as usize..BUCKETS {
        let (low, width) = bounds(bucket);
        assert!(width * 128 <= low, "bucket {bucket} from {low} is {width} wide");
    }
}

#[test]
fn quantiles_are_those_of_the_samples_within_the_error() {
    let mut draw = Draw::new(7);
    // The samples range from microseconds to minutes.
    let mut samples: Vec<u64> = (0..50_000).map(|_| (draw.unit() * 18.0).exp() as u64).collect();
    let histogram = of(samples.iter().copied());
    samples.sort_unstable();
    for quantile in [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0] {
        let rank = ((quantile * samples.len() as f64).ceil() as usize).max(1);
        let (exact, got) = (samples[rank - 1], histogram.quantile(quantile));
        assert!(got.abs_diff(exact) * 256 <= exact, "quantile {quantile}: {got}, not {exact}");
    }
}

#[test]
fn percentiles_of_few_samples_are_samples() {
    let summary = of((1..=100).map(|n| n * 2)).summary();
    assert_eq!((summary.p50, summary.p90, summary.p99), (0.1, 0.18, 0.198));
    assert_eq!((summary.min, summary.max, summary.mean, summary.count), (0.002, 0.2, 0.101, 100));
    let one = of([1_000_003]).summary();
    // A percentile is not the middle of its bucket if the middle lies outside the range of the samples.
    assert_eq!((one.p50, one.p999, one.max), (1000.003, 1000.003, 1000.003));
}

#[test]
fn nothing_measured_is_zero() {
    let summary = Histogram::default().summary();
    assert_eq!((summary.count, summary.min, summary.p99, summary.max), (0, 0.0, 0.0, 0.0));
    assert!(summary.mean == 0.0 && summary.buckets.is_empty());
}

#[test]
fn a_duration_of_days_counts_as_the_largest_value() {
    let mut histogram = of([5]);
    histogram.record(Duration::from_secs(1 << 40));
    assert_eq!((histogram.count(), histogram.max, histogram.quantile(0.1)), (2, (1 << MAX_BITS) - 1, 5));
    assert_eq!(histogram.counts[BUCKETS - 1], 1);
}
