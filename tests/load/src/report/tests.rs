use super::*;

fn served(first: u64, last: u64) -> Record {
    let arrivals = vec![(Duration::from_millis(first), 1), (Duration::from_millis(last), 2)];
    Record { arrivals, tokens: 3, prompt_tokens: 10, end: Duration::from_millis(last), ..Record::default() }
}

fn report(records: &[Record]) -> Report {
    let workload = Workload {
        requests: records.len(),
        rate: 1.0,
        prompt_tokens: (10, 10),
        max_tokens: 3,
        vocab_size: 5,
        seed: 0,
    };
    Report::new(workload, records, Duration::from_secs(2))
}

#[test]
fn figures_follow_from_the_records() {
    let report = report(&[served(10, 30), served(20, 80)]);
    assert!(report.invalid.is_empty(), "{:?}", report.invalid);
    assert_eq!(
        (report.requests_per_s, report.output_tokens_per_s, report.prompt_tokens_per_s),
        (1.0, 3.0, 10.0)
    );
    assert_eq!((report.ttft_ms.p50, report.ttft_ms.max), (10.0, 20.0));
    assert_eq!((report.itl_ms.p50, report.itl_ms.max), (20.0, 60.0));
    assert_eq!((report.tpot_ms.p50, report.tpot_ms.max), (10.0, 30.0));
}

#[test]
fn a_failure_spoils_the_run_and_its_times_count_for_nothing() {
    let failed = Record { failure: Some("empty".into()), ..served(1, 2) };
    let report = report(&[served(10, 30), failed.clone(), failed]);
    assert_eq!(report.failures, [("empty".to_owned(), 2)]);
    assert_eq!((report.ttft_ms.samples, report.ttft_ms.p50), (1, 10.0));
    assert_eq!(report.invalid, ["2 of 3 requests failed"]);
}

#[test]
fn a_late_generator_spoils_the_run() {
    let late = Record { lag: MAX_LAG * 2, ..served(10, 30) };
    assert_eq!(report(&[late]).invalid, ["the generator was 100 ms late at its 99th percentile"]);
}
