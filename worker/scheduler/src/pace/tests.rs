//! Tests of the pace on a simulated device with known costs, in virtual time.

use super::*;

/// Minimum number of tokens that a step prefills.
const LEAST: usize = 16;
/// Maximum number of tokens that a step prefills: what decodes leave of the step's budget.
const BUDGET: usize = 2048;
/// Number of steps that the pace may take to learn the costs of a device.
const FEW: usize = 8;

/// The costs of a device, in nanoseconds per step, row, token or attended token.
#[derive(Clone, Copy)]
struct Device {
    fixed: f64,
    row: f64,
    row_attended: f64,
    token: f64,
    token_attended: f64,
    /// Largest extra time of a step, as a share of its costs. The extra time is uniformly distributed.
    jitter: f64,
}

/// The costs of the `--device sim` profile.
const H200: Device =
    Device { fixed: 4.3e6, row: 5e3, row_attended: 38.0, token: 27.6e3, token_attended: 1.0, jitter: 0.0 };
/// The approximate costs of a model with 0.6 billion parameters on two CPU cores.
const CPU: Device =
    Device { fixed: 40e6, row: 4e6, row_attended: 2.5e3, token: 7e6, token_attended: 2.3e3, jitter: 0.0 };

/// A simulated run in which requests decode while one prompt after another is prefilled.
struct Run {
    pace: Pace,
    device: Device,
    target: Duration,
    decodes: usize,
    /// The position of every decode.
    context: usize,
    /// The next position of the prompt to prefill.
    position: usize,
    prompt: usize,
    random: u64,
}

/// The result of a step, with times in seconds.
struct Step {
    took: f64,
    /// Time of the step without its prefill.
    decodes: f64,
    /// True if the step reached the end of the prompt. Such a step may take less time than the target.
    is_last: bool,
}

impl Run {
    fn new(device: Device, target: Duration) -> Self {
        let (decodes, context, position, prompt, random) = (4, 100, 0, 4096, 1);
        Self { pace: Pace::new(Some(target)), device, target, decodes, context, position, prompt, random }
    }

    fn decoding(&self) -> Work {
        let mut work = Work::default();
        (0..self.decodes).for_each(|_| work.add_decode(self.context));
        work
    }

    fn seconds(&self, tokens: usize) -> f64 {
        let Device { fixed, row, row_attended, token, token_attended, .. } = self.device;
        let attended = tokens as f64 * (self.position as f64 + (tokens + 1) as f64 / 2.0);
        let decodes = self.decodes as f64 * (row + row_attended * (self.context + 1) as f64);
        (fixed + decodes + token * tokens as f64 + token_attended * attended) / 1e9
    }

    fn step(&mut self, tokens: usize) -> Step {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let uniform = (self.random >> 11) as f64 / (1_u64 << 53) as f64;
        let took = self.seconds(tokens) * (1.0 + self.device.jitter * uniform);
        let (decodes, is_last) = (self.seconds(0), self.position + tokens == self.prompt);
        self.observe(tokens, took);
        Step { took, decodes, is_last }
    }

    fn observe(&mut self, tokens: usize, took: f64) {
        let mut work = self.decoding();
        work.add_prefill(self.position..self.position + tokens);
        self.pace.observe(&work, Duration::from_secs_f64(took));
        self.context += 1;
        self.position = (self.position + tokens) % self.prompt;
    }

    fn decode(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step(0);
        }
    }

    fn allowed(&self) -> usize {
        self.pace.allowance(&self.decoding(), LEAST).tokens(self.position)
    }

    /// Runs steps with as much prefill as the pace allows.
    fn mixed(&mut self, steps: usize) -> Vec<Step> {
        let one = |_| self.step(self.allowed().min(self.prompt - self.position).min(BUDGET));
        (0..steps).map(one).collect()
    }

    /// Asserts that 99 of 100 steps take at most 1.05 times the target, and that prefill uses at least 85 percent of
    /// the time that the decodes leave.
    fn assert_pace(&self, what: &str, steps: &[Step]) {
        let target = self.target.as_secs_f64();
        let mut took: Vec<f64> = steps.iter().map(|step| step.took / target).collect();
        took.sort_by(f64::total_cmp);
        let p99 = took[(took.len() * 99).div_ceil(100) - 1];
        let full: Vec<&Step> = steps.iter().filter(|step| !step.is_last).collect();
        let shares = full.iter().map(|step| (step.took - step.decodes) / (target - step.decodes));
        let used = shares.sum::<f64>() / full.len() as f64;
        assert!(p99 <= 1.05, "{what}: 99 of 100 steps take up to {p99:.3} times the target");
        assert!(used >= 0.85, "{what}: {used:.3} of the time that decodes leave is used");
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn the_target_is_kept_and_its_time_used() {
    for (device, target) in [(H200, ms(12)), (H200, ms(20)), (CPU, ms(1000))] {
        for jitter in [0.0, 0.05, 0.1] {
            // A token costs more at later positions: on the H200 1.5 times as much after 16k positions, on the CPU four
            // times as much after 8k.
            for prompt in [1024, 8192, 16_384] {
                for decoded_before in [0, 50] {
                    let mut run = Run { prompt, ..Run::new(Device { jitter, ..device }, target) };
                    run.decode(decoded_before);
                    let steps = run.mixed(300);
                    let what = format!("{target:?}, jitter {jitter}, {prompt} after {decoded_before}");
                    run.assert_pace(&what, &steps[FEW..]);
                }
            }
        }
    }
}

#[test]
fn nothing_known_is_no_reason_to_begin_with_much() {
    for (device, target) in [(H200, ms(12)), (CPU, ms(1000))] {
        let mut run = Run::new(device, target);
        assert_eq!(run.allowed(), LEAST);
        let most = run.mixed(FEW).iter().map(|step| step.took).fold(0.0, f64::max);
        let over = most / target.as_secs_f64();
        assert!(over < 1.25, "a step of {over:.2} times the target while learning");
    }
}

#[test]
fn other_decodes_change_only_a_few_steps() {
    let mut run = Run::new(Device { jitter: 0.05, ..H200 }, ms(16));
    run.mixed(50);
    // 64 decodes with a context of 2,000 tokens lengthen each step by 5 ms until they end.
    for (decodes, context) in [(64, 2000), (4, 300), (64, 2000), (1, 8000)] {
        (run.decodes, run.context) = (decodes, context);
        let steps = run.mixed(200);
        run.assert_pace(&format!("{decodes} decodes"), &steps[FEW..]);
    }
}

#[test]
fn a_device_that_slows_down_or_recovers_is_followed() {
    let mut run = Run::new(H200, ms(16));
    run.mixed(50);
    for factor in [1.5, 1.0] {
        run.device = Device { fixed: factor * H200.fixed, token: factor * H200.token, jitter: 0.05, ..H200 };
        let steps = run.mixed(200);
        run.assert_pace(&format!("{factor} times the time"), &steps[2 * FEW..]);
    }
}

#[test]
fn a_stall_is_soon_forgotten() {
    let mut run = Run::new(H200, ms(12));
    run.mixed(50);
    let before = run.allowed();
    run.observe(before, 1.0);
    let steps = run.mixed(300);
    run.assert_pace("after a stall", &steps[4 * FEW..]);
}

#[test]
fn decodes_that_are_too_slow_alone_do_not_stop_prefill() {
    let mut run = Run::new(H200, ms(4));
    run.decode(20);
    assert_eq!(run.allowed(), LEAST);
    run.mixed(20);
    assert_eq!(run.allowed(), LEAST);
}

#[test]
fn nothing_bounds_prefill_without_a_target_or_without_decodes() {
    let mut run = Run::new(H200, ms(12));
    run.mixed(20);
    assert_eq!(run.pace.allowance(&Work::default(), LEAST).tokens(0), usize::MAX);
    run.pace.target = None;
    assert_eq!(run.allowed(), usize::MAX);
}

#[test]
fn an_allowance_is_not_spent_twice() {
    let mut run = Run::new(H200, ms(12));
    run.mixed(50);
    let mut allowance = run.pace.allowance(&run.decoding(), LEAST);
    let all = allowance.tokens(1000);
    allowance.spend(1000, all / 2);
    let rest = allowance.tokens(1000 + all / 2);
    assert!(rest.abs_diff(all - all / 2) <= 1, "{all} in two halves, the second {rest}");
    allowance.spend(1000 + all / 2, rest);
    assert_eq!(allowance.tokens(0), 0, "nor is the least");
}

#[test]
fn prefill_beside_the_decodes_of_another_share_slows_them_by_a_factor() {
    for (device, jitter) in [(H200, 0.0), (H200, 0.1), (H200, 0.3), (CPU, 0.0), (CPU, 0.3)] {
        let mut run =
            Run { pace: Pace::new(None), decodes: 1, ..Run::new(Device { jitter, ..device }, ms(0)) };
        run.decode(50);
        run.decodes = 64;
        let steps: Vec<Step> = (0..1000)
            .map(|_| {
                let allowed = run.pace.allowance_beside(&run.decoding(), LEAST).tokens(run.position);
                run.context = 300;
                run.step(allowed.min(run.prompt - run.position).min(BUDGET))
            })
            .collect();
        // The last steps show that the estimate does not drift.
        let last = &steps[steps.len() / 2..];
        let slower = last.iter().map(|step| step.took / step.decodes).sum::<f64>() / last.len() as f64;
        assert!((1.5..=SLOWER * 1.1).contains(&slower), "jitter {jitter}: {slower:.2} times as long");
    }
}
