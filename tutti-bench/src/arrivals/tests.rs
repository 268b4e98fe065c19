use super::*;

fn gaps(process: Process, seed: u64) -> Vec<f64> {
    let times: Vec<f64> =
        Arrivals::new(process, 50.0, seed).take(20_000).map(|at| at.as_secs_f64()).collect();
    times.windows(2).map(|w| w[1] - w[0]).collect()
}

#[test]
fn poisson_gaps_are_exponential_and_independent() {
    let gaps = gaps(Process::Poisson, 1);
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
    // The deviation of an exponential distribution equals its mean. 20,000 draws determine both to about 1 %.
    assert!((mean * 50.0 - 1.0).abs() < 0.03, "mean {mean}");
    assert!((variance.sqrt() / mean - 1.0).abs() < 0.05, "deviation {}", variance.sqrt());
    // In an exponential distribution, a share of 1/e of the gaps is longer than the mean.
    let long = gaps.iter().filter(|gap| **gap > mean).count() as f64 / gaps.len() as f64;
    assert!((long - (-1f64).exp()).abs() < 0.02, "{long} of the gaps are longer than the mean");
    let covariance = gaps.windows(2).map(|w| (w[0] - mean) * (w[1] - mean)).sum::<f64>() / gaps.len() as f64;
    assert!((covariance / variance).abs() < 0.03, "a gap depends on the one before: {covariance}");
}

#[test]
fn the_seed_decides_the_times() {
    assert_eq!(gaps(Process::Poisson, 1), gaps(Process::Poisson, 1));
    assert_ne!(gaps(Process::Poisson, 1), gaps(Process::Poisson, 2));
}

#[test]
fn constant_gaps_are_equal() {
    assert!(gaps(Process::Constant, 1).iter().all(|gap| (gap - 0.02).abs() < 1e-6));
}

#[test]
fn an_infinite_rate_lets_all_arrive_at_once() {
    for process in [Process::Poisson, Process::Constant] {
        assert!(Arrivals::new(process, f64::INFINITY, 0).take(100).all(|at| at.is_zero()));
    }
}
