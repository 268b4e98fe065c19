//! Tests that the engine gives the same results on two threads as on one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::mpsc::{Receiver, sync_channel},
    thread::{self, JoinHandle},
};

use tutti_engine::{Engine, EngineHandle, EngineSettings, StepOutput};
use tutti_kernels::DeviceError;
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::Error;
use tutti_settings::{Admission, ByteSize};

use crate::common::{self, InFlight, engine, engine_in_flight, expected, launch, settings};

/// An engine whose device has a thread of its own. The channel from that thread has room for the output of one step.
struct Running {
    engine: EngineHandle,
    outputs: Receiver<StepOutput>,
    device: JoinHandle<Result<(), Error>>,
}

fn start(engine: Engine) -> Running {
    let (mut device_loop, handle) = engine.split();
    let (sender, outputs) = sync_channel(1);
    let device = thread::spawn(move || {
        loop {
            if let Some(output) = device_loop.turn()? {
                let _ = sender.send(output);
            }
            if !device_loop.run()? && !device_loop.wait() {
                return Ok(());
            }
        }
    });
    Running { engine: handle, outputs, device }
}

impl Running {
    fn report(&mut self) -> Option<pb::StepReport> {
        let report = self.engine.report(self.outputs.recv().ok()?);
        self.engine.plan_ahead();
        Some(report)
    }

    fn end(self) -> Result<(), Error> {
        drop((self.engine, self.outputs));
        self.device.join().expect("the device's thread did not panic")
    }
}

#[test]
fn requests_that_come_and_go_during_steps_give_the_tokens_of_a_request_alone() {
    let admissions = [Admission::WholeLife, Admission::Optimistic];
    for (admission, in_flight) in
        admissions.into_iter().flat_map(|admission| InFlight::ALL.map(|in_flight| (admission, in_flight)))
    {
        // With optimistic admission, the running requests outgrow the pool.
        let settings = EngineSettings { admission, kv_cache_memory: Some(ByteSize(41 * 64)), ..settings() };
        let mut running = start(engine_in_flight(&settings, in_flight).0);
        let launches: Vec<_> = (0..60)
            .map(|request| launch(request, 1 + request as usize % 30, 9 + request as u32 % 20))
            .collect();
        let mut to_come = launches.iter();
        let mut tokens = BTreeMap::<u64, Vec<u32>>::new();
        let (mut ended, mut cancelled) = (BTreeSet::new(), BTreeSet::new());
        to_come.by_ref().take(5).for_each(|launch| running.engine.launch(launch.clone()));
        while ended.len() < launches.len() {
            let report = running.report().expect("the device is there");
            for row in report.rows {
                let request = row.key.unwrap().request;
                assert!(!ended.contains(&request), "a row after the end");
                let tokens = tokens.entry(request).or_default();
                assert!(row.tokens.iter().all(|token| token.index as usize == tokens.len()));
                tokens.extend(row.tokens.iter().map(|token| token.token_id));
                if request % 7 == 3 && tokens.len() == 4 && cancelled.insert(request) {
                    running.engine.cancel(row.key.unwrap().into());
                }
            }
            for completion in report.completions {
                assert!(ended.insert(completion.key.unwrap().request), "two endings");
                to_come.next().into_iter().for_each(|launch| running.engine.launch(launch.clone()));
            }
        }
        for launch in &launches {
            let request = launch.key.unwrap().request;
            let (tokens, expected) = (&tokens[&request], expected(launch).output);
            if cancelled.contains(&request) {
                assert_eq!(*tokens, expected[..tokens.len()]);
            } else {
                assert_eq!(*tokens, expected);
            }
        }
        assert!(running.engine.is_idle());
        running.end().unwrap();
    }
}

#[test]
fn a_cancel_during_a_step_frees_pages_at_the_end_of_that_step() {
    let mut running = start(engine(&settings()).0);
    running.engine.launch(launch(1, 30, 200));
    let first = running.report().unwrap();
    running.engine.cancel(launch(1, 1, 1).key.unwrap().into());
    // One output may wait in the channel, and one step may run. So the third report at the latest has the ending.
    let ending = (0..3).find_map(|_| running.report().filter(|report| !report.completions.is_empty()));
    let ending = ending.expect("the third report at the latest");
    assert!(ending.step <= first.step + 3);
    assert_eq!(ending.load.unwrap().kv_pages_used, 0);
    running.end().unwrap();
}

#[test]
fn a_row_that_fails_alone_fails_only_its_request() {
    let (engine, probe) = engine(&settings());
    probe.lock().unwrap().poison = Some(common::VOCAB - 1);
    let mut running = start(engine);
    for request in 1..=3 {
        let mut launch = launch(request, 8, 4);
        if request == 2 {
            launch.spec.as_mut().unwrap().prompt[3] = common::VOCAB - 1;
        }
        running.engine.launch(launch);
    }
    let mut outcomes = BTreeMap::new();
    while outcomes.len() < 3 {
        for completion in running.report().unwrap().completions {
            outcomes.insert(completion.key.unwrap().request, completion.outcome.unwrap());
        }
    }
    for (request, outcome) in outcomes {
        let failed = matches!(outcome, pb::completion::Outcome::Failed(_));
        assert_eq!(failed, request == 2, "{request}: {outcome:?}");
    }
    running.end().unwrap();
}

#[test]
fn a_lost_device_ends_its_thread_with_an_error() {
    let (engine, probe) = engine(&settings());
    probe.lock().unwrap().fail_next = Some(DeviceError::Lost("ECC".into()));
    let mut running = start(engine);
    running.engine.launch(launch(1, 8, 4));
    assert!(running.report().is_none());
    assert_eq!(running.end().unwrap_err().message(), "device lost: ECC");
}
