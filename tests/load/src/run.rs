//! Sends the requests of a plan and collects their records.

use std::time::Duration;

use tokio::{task::JoinSet, time::Instant};

use crate::{
    client::{Record, Target},
    plan::Workload,
};

/// Sends every request of the plan at its planned time. Returns the records and the duration of the run.
pub async fn run(target: &Target, workload: &Workload) -> (Vec<Record>, Duration) {
    let start = Instant::now();
    let max_tokens = workload.max_tokens;
    let mut tasks = JoinSet::new();
    for planned in workload.plan() {
        let due = start + planned.at;
        tokio::time::sleep_until(due).await;
        let target = target.clone();
        tasks.spawn(async move {
            let lag = due.elapsed();
            Record { lag, ..target.generate(&planned.prompt, max_tokens, planned.seed).await }
        });
    }
    let records = tasks.join_all().await;
    (records, start.elapsed())
}
