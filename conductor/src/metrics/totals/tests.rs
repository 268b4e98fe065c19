use std::time::Duration;

use tutti_runtime::metrics::Metrics;

use super::*;

#[test]
fn totals_are_the_sums_over_present_workers() {
    let metrics = Metrics::default();
    let totals = metrics.register(Totals::register);
    let shows = |lines: [&str; 4]| {
        let text = metrics.encode();
        let value =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(&format!("tutti_conductor_{name} ")));
        for line in lines {
            let (name, expected) = line.split_once(' ').unwrap();
            let shown = value(name).unwrap_or_else(|| panic!("{name} is not in {text}"));
            if name == "queue_age_seconds" && expected != "0.0" {
                // The age grows from the time of the report on.
                let (shown, expected): (f64, f64) = (shown.parse().unwrap(), expected.parse().unwrap());
                assert!(shown >= expected, "{shown} for {line}");
            } else {
                assert_eq!(shown, expected, "{name}");
            }
        }
    };
    shows(["requests_running 0", "requests_waiting 0", "kv_utilization 0.0", "queue_age_seconds 0.0"]);
    let load = |running, waiting, kv_pages_used, oldest_waiting_ms| pb::WorkerLoad {
        running,
        waiting,
        kv_pages_used,
        kv_pages_total: 10,
        oldest_waiting_ms,
        ..Default::default()
    };
    totals.take(Rank(0), &load(3, 1, 2, 500));
    totals.take(Rank(1), &load(4, 0, 8, 0));
    shows(["requests_running 7", "requests_waiting 1", "kv_utilization 0.5", "queue_age_seconds 0.5"]);
    // A report replaces the last one of the same worker.
    totals.take(Rank(1), &load(1, 2, 4, 1500));
    shows(["requests_running 4", "requests_waiting 3", "kv_utilization 0.3", "queue_age_seconds 1.5"]);
    totals.gone(Rank(1));
    shows(["requests_running 3", "requests_waiting 1", "kv_utilization 0.2", "queue_age_seconds 0.5"]);
}

#[test]
fn a_queue_grows_older_while_its_worker_reports_nothing() {
    let age = |oldest_waiting_ms| QueueAge::of(&pb::WorkerLoad { oldest_waiting_ms, ..Default::default() });
    let (waits, empty) = (age(500), age(0));
    let later = |age: QueueAge| age.seconds(age.reported + Duration::from_secs(7));
    assert_eq!((later(waits), later(empty)), (7.5, 0.0));
}
