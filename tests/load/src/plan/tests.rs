use super::*;

fn workload() -> Workload {
    Workload { requests: 20_000, rate: 50.0, prompt_tokens: (1, 3), max_tokens: 8, vocab_size: 7, seed: 1 }
}

#[test]
fn the_seed_decides_everything() {
    assert_eq!(workload().plan(), workload().plan());
    assert_ne!(workload().plan(), Workload { seed: 2, ..workload() }.plan());
}

#[test]
fn arrivals_are_poisson() {
    let plan = workload().plan();
    let gaps: Vec<f64> = plan.windows(2).map(|w| (w[1].at - w[0].at).as_secs_f64()).collect();
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
    // The deviation of an exponential distribution equals its mean. 20,000 draws determine both to about 1 %.
    assert!((mean * 50.0 - 1.0).abs() < 0.03, "mean {mean}");
    assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "deviation {}", variance.sqrt());
}

#[test]
fn prompts_keep_to_their_ranges_and_use_them_whole() {
    let plan = workload().plan();
    let lengths: std::collections::BTreeSet<_> = plan.iter().map(|p| p.prompt.len()).collect();
    let ids: std::collections::BTreeSet<_> = plan.iter().flat_map(|p| p.prompt.clone()).collect();
    assert_eq!(lengths, (1..=3).collect());
    assert_eq!(ids, (0..7).collect());
}

#[test]
fn an_infinite_rate_sends_all_at_once() {
    let plan = Workload { rate: f64::INFINITY, ..workload() }.plan();
    assert!(plan.iter().all(|p| p.at.is_zero()));
}
