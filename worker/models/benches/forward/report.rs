//! The table of a benchmark: the time of each operation, compared with the machine's limits.

use std::{collections::BTreeMap, time::Duration};

use super::{limits::Limits, timing::Work};

/// The result of one kind of work in one round.
pub struct Round {
    /// Seconds.
    pub time: f64,
    pub limits: Limits,
    pub operations: BTreeMap<String, Work>,
}

/// Prints the round with the median time. `amount` is the amount of work of a round, in units of `unit`. `limits` are
/// those of the machine. Sorts the rounds by time.
pub fn report(name: &str, unit: &str, amount: f64, rounds: &mut [Round], limits: Limits) {
    rounds.sort_by(|a, b| a.time.total_cmp(&b.time));
    let (Some(median), Some(least)) = (rounds.get(rounds.len() / 2), rounds.first()) else { return };
    let Limits { flops, products, bytes } = limits;
    let rate = |round: &Round| amount / round.time;
    println!(
        "\n{name}: {:.2} {unit}/s (best {:.2}), {:.2} ms; limits {:.0} GFLOP/s in attention, {:.0} GOP/s in products, \
         {:.1} GB/s",
        rate(median),
        rate(least),
        median.time * 1e3,
        flops / 1e9,
        products / 1e9,
        bytes / 1e9,
    );
    let mut rows: Vec<_> = median.operations.iter().collect();
    rows.sort_by_key(|(_, work)| std::cmp::Reverse(work.time));
    let known: Duration = rows.iter().map(|(_, work)| work.time).sum();
    let other = median.time - known.as_secs_f64();
    let mut limit = 0.0;
    for (name, work) in rows {
        let time = work.time.as_secs_f64();
        let floor = work.least(&limits);
        limit += floor;
        let share = 100.0 * time / median.time;
        let each = time * 1e6 / work.calls as f64;
        print!("  {name:24} {:5} x {each:10.1} us {share:5.1} %", work.calls);
        if floor > 0.0 {
            let (gops, gbytes) = ((work.flops + work.products) / time / 1e9, work.bytes / time / 1e9);
            print!("  {gops:7.1} GOP/s {gbytes:6.1} GB/s  {:.2} of the limit", floor / time);
        }
        println!();
    }
    println!("  between operations {:31.2} %", 100.0 * other / median.time);
    println!("  the whole: {:.2} of the limit", limit / median.time);
}
