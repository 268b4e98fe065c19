//! Idle time of a simulated device between two steps, with one step in flight and with two.

use std::{sync::Arc, time::Duration};

use serde::Serialize;
use tutti_engine::{Engine, EngineSettings};
use tutti_models::{SimMeter, SimOptions, load_metered_sim};
use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_settings::{ByteSize, SimProfile, SimSettings};

use super::{Failure, PAGE_TOKENS, PROMPT, TwoThreads, Working, launch, median, root};

/// Number of runs per variant; odd, so that there is a median.
const RUNS: usize = 5;
/// Token budget of a step, large enough for one token of each row.
const MAX_STEP_TOKENS: usize = 1024;

/// Results for one simulated device.
#[derive(Serialize)]
pub struct IdleFigures {
    step_us: u32,
    rows: usize,
    steps_in_flight: usize,
    /// Idle time between steps, in percent of the device's time, of each run.
    idle_percent: Vec<f64>,
    median_idle_percent: f64,
    /// Mean time in microseconds per step that the device's thread spent on planning (`plan_us`) and on committing
    /// (`commit_us`) in the last run.
    plan_us: f64,
    commit_us: f64,
}

/// Measures every combination of step duration, number of rows and steps in flight.
pub fn measure() -> Result<Vec<IdleFigures>, Failure> {
    let mut figures = Vec::new();
    for step_us in [1000, 5000] {
        for rows in [256, 1000] {
            figures.extend(compare(step_us, rows)?);
        }
    }
    Ok(figures)
}

/// Measures one and two steps in flight alternately, so that other load of the machine affects both.
fn compare(step_us: u32, rows: usize) -> Result<Vec<IdleFigures>, Failure> {
    let steps = u64::from(1_000_000 / step_us);
    let mut devices = [Device::start(step_us, rows, steps, 1)?, Device::start(step_us, rows, steps, 2)?];
    for run in 0..RUNS as u64 {
        for device in &mut devices {
            device.run(run)?;
        }
    }
    devices.into_iter().map(Device::end).collect()
}

struct Device {
    engine: TwoThreads,
    meter: Arc<SimMeter>,
    steps: u64,
    figures: IdleFigures,
}

impl Device {
    fn start(step_us: u32, rows: usize, steps: u64, steps_in_flight: usize) -> Result<Self, Failure> {
        let sim = SimSettings {
            profile: SimProfile::Instant,
            fixed_us: Some(step_us),
            steps_in_flight,
            ..Default::default()
        };
        let (model, meter) = load_metered_sim(&SimOptions {
            dir: &root().join("tests/tutti-tiny/checkpoint"),
            max_step_tokens: MAX_STEP_TOKENS,
            page_tokens: PAGE_TOKENS,
            nodes: None,
            rank: 0,
            settings: &sim,
        })?;
        let pages = rows * (PROMPT + 2 * steps as usize + 200).div_ceil(PAGE_TOKENS) + 1;
        let settings = EngineSettings {
            max_step_tokens: MAX_STEP_TOKENS,
            max_running_requests: Some(rows),
            kv_cache_memory: Some(ByteSize((pages * model.page_bytes()) as u64)),
            ..EngineSettings::default()
        };
        let mut engine = Engine::new(model, Rank(0), &settings, rows)?;
        engine.warm_up()?;
        let figures = IdleFigures {
            step_us,
            rows,
            steps_in_flight,
            idle_percent: Vec::new(),
            median_idle_percent: 0.0,
            plan_us: 0.0,
            commit_us: 0.0,
        };
        Ok(Self { engine: TwoThreads::start(engine)?, meter, steps, figures })
    }

    /// Decodes with all rows for `steps` steps, after a warm-up of `steps / 10` steps.
    fn run(&mut self, run: u64) -> Result<(), Failure> {
        let Self { engine, meter, steps, figures } = self;
        let key = |row: usize| pb::GraphKey { request: run * 10_000 + row as u64, incarnation: 0, graph: 0 };
        let warm = *steps / 10;
        for row in 0..figures.rows {
            engine.launch(launch(key(row), (*steps + warm) as u32 + 200));
        }
        let (mut full, mut before, mut work) = (0, times(meter), pb::StepWork::default());
        while full < warm + *steps {
            let report = engine.report()?;
            full += u64::from(report.rows.len() == figures.rows);
            if full == warm {
                (before, work) = (times(meter), pb::StepWork::default());
            }
            if let Some(step) = report.work {
                work.plan_us += step.plan_us;
                work.commit_us += step.commit_us;
            }
        }
        let after = times(meter);
        let (busy, idle) = (after.0 - before.0, after.1 - before.1);
        figures.idle_percent.push(100.0 * idle.as_secs_f64() / (busy + idle).as_secs_f64());
        let per_step = |us: u32| f64::from(us) / *steps as f64;
        (figures.plan_us, figures.commit_us) = (per_step(work.plan_us), per_step(work.commit_us));
        (0..figures.rows).for_each(|row| engine.cancel(key(row)));
        let mut ended = 0;
        while ended < figures.rows {
            ended += engine.report()?.completions.len();
        }
        Ok(())
    }

    fn end(self) -> Result<IdleFigures, Failure> {
        let Self { engine, mut figures, .. } = self;
        engine.end()?;
        figures.median_idle_percent = median(&figures.idle_percent);
        let IdleFigures {
            step_us, rows, steps_in_flight, median_idle_percent: idle, plan_us, commit_us, ..
        } = &figures;
        eprintln!(
            "{step_us} us a step, {rows} rows, {steps_in_flight} in flight: device idle {idle:.2} % \
             (plan {plan_us:.0} us, commit {commit_us:.0} us a step)"
        );
        Ok(figures)
    }
}

fn times(meter: &SimMeter) -> (Duration, Duration) {
    (meter.busy(), meter.idle())
}
