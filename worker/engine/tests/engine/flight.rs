//! Tests with several steps in flight: requests that end, are cancelled or fail while they have rows in all of these
//! steps.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use tutti_engine::{Engine, EngineSettings, StepObserver, StepRecord};
use tutti_kernels::DeviceError;
use tutti_proto::cluster::v1::{self as pb, completion::Outcome};
use tutti_settings::{Admission, ByteSize, Chunking};

use crate::common::{InFlight, PAGE_BYTES, Probe, VOCAB, engine_in_flight, expected, launch, settings};

/// Devices that hold more than one step.
fn several() -> impl Iterator<Item = InFlight> {
    InFlight::ALL.into_iter().filter(|in_flight| in_flight.steps > 1)
}

/// Records of all steps.
#[derive(Clone, Default)]
struct Records(Arc<Mutex<Vec<StepRecord>>>);

impl StepObserver for Records {
    fn observe(&mut self, step: StepRecord) {
        self.0.lock().unwrap().push(step);
    }

    fn lost(&self) -> u64 {
        0
    }
}

impl Records {
    fn void_rows(&self) -> u32 {
        self.0.lock().unwrap().iter().map(|step| step.void_rows).sum()
    }

    fn tokens(&self) -> usize {
        self.0.lock().unwrap().iter().flat_map(|step| &step.rows).map(|row| row.positions.len()).sum()
    }
}

struct Bench {
    engine: Engine,
    probe: Arc<Mutex<Probe>>,
    records: Records,
    tokens: BTreeMap<u64, Vec<u32>>,
    outcomes: BTreeMap<u64, Outcome>,
    load: pb::WorkerLoad,
}

impl Bench {
    fn new(settings: &EngineSettings, in_flight: InFlight) -> Self {
        let (mut engine, probe) = engine_in_flight(settings, in_flight);
        let records = Records::default();
        engine.set_observer(Box::new(records.clone()));
        let (tokens, outcomes, load) = Default::default();
        Self { engine, probe, records, tokens, outcomes, load }
    }

    fn step(&mut self) -> bool {
        let Some(report) = self.engine.step().expect("the device is there") else { return false };
        for row in report.rows {
            let request = row.key.unwrap().request;
            assert!(!self.outcomes.contains_key(&request), "a row after the end");
            self.tokens.entry(request).or_default().extend(row.tokens.iter().map(|token| token.token_id));
        }
        for completion in report.completions {
            let request = completion.key.unwrap().request;
            assert!(self.outcomes.insert(request, completion.outcome.unwrap()).is_none(), "two endings");
        }
        self.load = report.load.unwrap();
        true
    }

    fn run_to_end(&mut self) {
        while self.step() {}
        assert!(self.engine.is_idle());
        assert_eq!(self.engine.load().kv_pages_used, 0);
    }

    /// Asserts that a request has finished with all its tokens.
    fn check(&self, launch: &pb::LaunchGraph) {
        let request = launch.key.unwrap().request;
        assert!(matches!(self.outcomes[&request], Outcome::Finished(_)), "{:?}", self.outcomes[&request]);
        assert_eq!(self.tokens[&request], expected(launch).output, "request {request}");
    }
}

#[test]
fn an_end_at_a_stop_token_leaves_one_void_row_per_further_step_and_an_end_by_length_none() {
    for in_flight in several() {
        let mut bench = Bench::new(&settings(), in_flight);
        let mut whole = launch(1, 8, 12);
        let output = expected(&whole).output;
        whole.spec.as_mut().unwrap().stopping.as_mut().unwrap().stop_token_ids = vec![output[4]];
        bench.engine.launch(whole);
        bench.run_to_end();
        assert_eq!(bench.tokens[&1], output[..5]);
        assert_eq!(bench.records.void_rows(), in_flight.steps as u32 - 1);
        assert_eq!(bench.records.tokens(), 8 + 4, "a void row computes nothing that counts");

        let mut bench = Bench::new(&settings(), in_flight);
        let whole = launch(2, 8, 12);
        bench.engine.launch(whole.clone());
        bench.run_to_end();
        bench.check(&whole);
        assert_eq!(bench.records.void_rows(), 0);
        assert_eq!(bench.probe.lock().unwrap().tokens, 8 + 11, "no step computes beyond max_tokens");
    }
}

#[test]
fn a_cancel_inside_two_steps_ends_at_once_and_frees_pages_when_the_last_row_is_done() {
    // The pool has pages for one request alone, so that the second request gets the pages and the slot of the first.
    let tight = EngineSettings { kv_cache_memory: Some(ByteSize(13 * PAGE_BYTES as u64)), ..settings() };
    for in_flight in several() {
        for after in 1..8 {
            let mut bench = Bench::new(&tight, in_flight);
            let (first, second) = (launch(1, 10, 38), launch(2, 11, 37));
            bench.engine.launch(first.clone());
            bench.engine.launch(second.clone());
            (0..after).for_each(|_| assert!(bench.step()));
            bench.engine.cancel(first.key.unwrap().into());
            assert!(bench.step());
            assert!(matches!(bench.outcomes[&1], Outcome::Cancelled(_)), "the next plan ends it");
            let tokens = bench.tokens[&1].clone();
            assert_eq!(tokens, expected(&first).output[..tokens.len()]);
            bench.run_to_end();
            bench.check(&second);
            // At the cancel, `steps - 1` steps are in flight, because `step` has just collected one. The cancelled
            // request's row in each of them is void.
            assert_eq!(bench.records.void_rows(), in_flight.steps as u32 - 1);
        }
    }
}

#[test]
fn a_refused_step_fails_the_row_at_fault_and_runs_no_other_twice() {
    for in_flight in InFlight::ALL {
        for chunking in [Chunking::Scheduler, Chunking::Engine] {
            let settings = EngineSettings { chunking, max_prefill_chunk_size: Some(5), ..settings() };
            let mut bench = Bench::new(&settings, in_flight);
            bench.probe.lock().unwrap().poison = Some(VOCAB - 1);
            let mut launches: Vec<_> = (1..=3).map(|request| launch(request, 14, 6)).collect();
            launches[1].spec.as_mut().unwrap().prompt[7] = VOCAB - 1;
            launches.iter().for_each(|launch| bench.engine.launch(launch.clone()));
            bench.run_to_end();
            assert!(matches!(&bench.outcomes[&2], Outcome::Failed(fault)
                if fault.message == "out of device memory: 9 bytes for logits"));
            assert!(!bench.tokens.contains_key(&2));
            for index in [0, 2] {
                bench.check(&launches[index]);
            }
            let computed = bench.probe.lock().unwrap().tokens;
            // Only the first chunk of the refused request runs. No row of the other requests runs twice.
            assert!((2 * 19..=2 * 19 + 7).contains(&computed), "{computed} tokens");
        }
    }
}

#[test]
fn a_step_refused_once_at_any_time_fails_no_request() {
    for in_flight in InFlight::ALL {
        for at in 0..10 {
            let mut bench = Bench::new(&settings(), in_flight);
            let launches: Vec<_> = (1..=3).map(|request| launch(request, 9 + request as usize, 8)).collect();
            launches.iter().for_each(|launch| bench.engine.launch(launch.clone()));
            for step in 0.. {
                if step == at {
                    let error = DeviceError::OutOfMemory { what: "logits", wanted: 9 };
                    bench.probe.lock().unwrap().fail_next = Some(error);
                }
                if !bench.step() {
                    break;
                }
            }
            launches.iter().for_each(|launch| bench.check(launch));
            bench.run_to_end();
        }
    }
}

#[test]
fn a_token_that_cannot_be_sampled_fails_its_request_alone_and_its_later_rows_are_void() {
    for in_flight in InFlight::ALL {
        for failing in 0..8 {
            let mut bench = Bench::new(&settings(), in_flight);
            let launches: Vec<_> = (1..=3).map(|request| launch(request, 9, 8)).collect();
            let seed = launches[1].spec.as_ref().unwrap().sampling.as_ref().unwrap().seed;
            bench.probe.lock().unwrap().fail_sampling = Some((seed, 9 + failing));
            launches.iter().for_each(|launch| bench.engine.launch(launch.clone()));
            bench.run_to_end();
            assert!(matches!(&bench.outcomes[&2], Outcome::Failed(fault)
                if fault.message.contains("no token to sample")));
            let tokens = bench.tokens.get(&2).cloned().unwrap_or_default();
            assert_eq!(tokens, expected(&launches[1]).output[..failing as usize]);
            bench.check(&launches[0]);
            bench.check(&launches[2]);
            // The request ends at its eighth token, so no row is planned beyond that, even if an earlier token fails.
            let later = (in_flight.steps as u64 - 1).min(7 - failing);
            assert_eq!(u64::from(bench.records.void_rows()), later);
            let computed = bench.probe.lock().unwrap().tokens;
            assert_eq!(computed, 2 * 16 + 9 + failing as usize + later as usize, "each row ran once");
        }
    }
}

#[test]
fn a_loss_between_enqueue_and_collect_ends_the_worker() {
    let failures: [fn(&mut Probe); 4] = [
        |probe| probe.fail_next = Some(DeviceError::Lost("ECC".into())),
        |probe| probe.fail_logits = Some(DeviceError::Lost("ECC".into())),
        // The layers have already run, so the step cannot run again. Even a refusal thus counts as a loss of the
        // device.
        |probe| probe.fail_logits = Some(DeviceError::Misuse("ECC".into())),
        |probe| probe.fail_collect = Some(DeviceError::Lost("ECC".into())),
    ];
    for in_flight in InFlight::ALL {
        for fail in failures {
            for after in 0..4 {
                let mut bench = Bench::new(&settings(), in_flight);
                bench.engine.launch(launch(1, 8, 30));
                (0..after).for_each(|_| assert!(bench.step()));
                fail(&mut bench.probe.lock().unwrap());
                let error = bench.engine.step().unwrap_err();
                assert!(
                    error.message().contains("device lost") && error.message().contains("ECC"),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn preempted_requests_leave_no_trace_in_steps_in_flight() {
    // The requests outgrow the pool and stop at different tokens, so that ends, preemptions and admissions fall into
    // the same steps.
    let tight = EngineSettings {
        kv_cache_memory: Some(ByteSize(25 * PAGE_BYTES as u64)),
        admission: Admission::Optimistic,
        ..settings()
    };
    for in_flight in InFlight::ALL {
        let mut bench = Bench::new(&tight, in_flight);
        let launches: Vec<_> =
            (0..30).map(|request| launch(request, 3 + request as usize % 11, 24)).collect();
        let mut ends = BTreeMap::new();
        for whole in &launches {
            let (mut stopping, request) = (whole.clone(), whole.key.unwrap().request);
            let output = expected(whole).output;
            let stop = output[request as usize % 24];
            stopping.spec.as_mut().unwrap().stopping.as_mut().unwrap().stop_token_ids = vec![stop];
            let length = 1 + output.iter().position(|token| *token == stop).unwrap();
            ends.insert(request, output[..length].to_vec());
            bench.engine.launch(stopping);
        }
        bench.run_to_end();
        assert_eq!(bench.tokens, ends);
        assert!(bench.load.preemptions > 0, "the pool is large enough for all");
    }
}
