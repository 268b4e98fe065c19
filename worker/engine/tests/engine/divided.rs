//! Tests of requests that one engine prefills and another decodes. Their tokens are the same as on one engine.

mod failures;
mod goldens;
mod known_pages;
mod masks;
mod media;
mod pauses;
mod slots;

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use tutti_engine::{DeviceLoop, Engine, EngineHandle, EngineSettings, OutputToken, TransferError};
use tutti_proto::{GraphKey, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind};
use tutti_settings::{Admission, ByteSize};
use tutti_transfer::{Connector, Event, HandOver, Import, Run, Source, UnitKind};

use crate::common::{
    CONTEXT, DECODE, InFlight, PAGE_TOKENS, PREFILL, Probe, engine, engine_in_flight, expected, launch,
    settings,
};

const PAGE_BYTES: usize = PAGE_TOKENS * 4;

/// A run of pages, of embeddings, or of one slot, with its bytes.
type Sent = (Run, Vec<u8>);

/// Traffic between an engine and its connector.
#[derive(Default)]
struct Traffic {
    room: usize,
    sent: VecDeque<Sent>,
    exported: VecDeque<(GraphKey, HandOver)>,
    reserved: Vec<(GraphKey, usize, usize)>,
    ended: Vec<GraphKey>,
    events: VecDeque<Event>,
}

#[derive(Clone, Default)]
struct TestConnector(Arc<Mutex<Traffic>>);

impl TestConnector {
    fn lock(&self) -> MutexGuard<'_, Traffic> {
        self.0.lock().expect("no thread panicked")
    }
}

impl Connector for TestConnector {
    fn room(&self) -> usize {
        self.lock().room
    }
    fn send(&mut self, run: Run, data: Vec<u8>) {
        self.lock().sent.push_back((run, data));
    }
    fn export(&mut self, key: GraphKey, hand_over: HandOver, _: Instant) {
        self.lock().exported.push_back((key, hand_over));
    }
    fn reserve(&mut self, key: GraphKey, _: UnitKind, pages: usize, known: usize) {
        self.lock().reserved.push((key, pages, known));
    }
    fn end(&mut self, key: GraphKey) {
        self.lock().ended.push(key);
    }
    fn next_event(&mut self) -> Option<Event> {
        self.lock().events.pop_front()
    }
}

/// An engine on the test's thread, and the results that it has reported.
struct Side {
    probe: Arc<Mutex<Probe>>,
    device: DeviceLoop,
    engine: EngineHandle,
    connector: TestConnector,
    tokens: BTreeMap<u64, Vec<pb::SampledToken>>,
    outcomes: BTreeMap<u64, pb::completion::Outcome>,
    load: pb::WorkerLoad,
}

impl Side {
    fn new(settings: &EngineSettings) -> Self {
        Self::in_flight(settings, InFlight::ONE)
    }

    fn in_flight(settings: &EngineSettings, in_flight: InFlight) -> Self {
        let (engine, probe) = engine_in_flight(settings, in_flight);
        Self { probe, ..Self::of(engine) }
    }

    /// Makes a side from an engine whose model has no probe.
    fn of(engine: Engine) -> Self {
        let (device, mut engine) = engine.split();
        let connector = TestConnector::default();
        connector.lock().room = usize::MAX;
        engine.connect(Box::new(connector.clone()));
        let (probe, tokens, outcomes, load) = Default::default();
        Self { probe, device, engine, connector, tokens, outcomes, load }
    }

    /// Runs one turn. Returns false if there was nothing to do.
    fn step(&mut self) -> bool {
        self.turn(&mut Vec::new())
    }

    /// Runs one turn. Returns the prompt logprobs that it reported.
    fn step_with_scores(&mut self) -> Vec<pb::PromptLogprobs> {
        let mut scores = Vec::new();
        self.turn(&mut scores);
        scores
    }

    fn turn(&mut self, scores: &mut Vec<pb::PromptLogprobs>) -> bool {
        let output = self.device.turn().expect("the device is there");
        let reported = output.is_some();
        if let Some(report) = output.map(|output| self.engine.report(output)) {
            self.load = report.load.unwrap();
            for row in report.rows {
                scores.extend(row.prompt_logprobs);
                self.tokens.entry(row.key.unwrap().request).or_default().extend(row.tokens);
            }
            for completion in report.completions {
                let ended =
                    self.outcomes.insert(completion.key.unwrap().request, completion.outcome.unwrap());
                assert!(ended.is_none(), "two endings");
            }
        }
        self.device.run().expect("the device is there") || reported
    }

    fn idle(&mut self) {
        while self.step() {}
    }

    fn give(&self, event: Event) {
        self.connector.lock().events.push_back(event);
    }

    fn ids(&self, request: u64) -> Vec<u32> {
        self.tokens.get(&request).into_iter().flatten().map(|token| token.token_id).collect()
    }
}

fn key(request: u64, graph: u32) -> GraphKey {
    pb::GraphKey { request, incarnation: 0, graph }.into()
}

fn prefill(whole: &pb::LaunchGraph) -> pb::LaunchGraph {
    prefill_behind(whole, 0)
}

/// Returns the prefill graph of a request. The decoding side already has the request's first `known` pages.
fn prefill_behind(whole: &pb::LaunchGraph, known: usize) -> pb::LaunchGraph {
    let send_to =
        pb::PlaneDestination { secret: vec![0; 16], known_pages: known as u32, ..Default::default() };
    pb::LaunchGraph { walks: vec![PREFILL], send_to: Some(send_to), ..whole.clone() }
}

fn decode(whole: &pb::LaunchGraph) -> pb::LaunchGraph {
    let receive = pb::PlaneReservation { secret: vec![0; 16], lease_ms: 1000 };
    let key = whole.key.map(|key| pb::GraphKey { graph: 1, ..key });
    pb::LaunchGraph { key, walks: vec![DECODE], receive: Some(receive), ..whole.clone() }
}

/// Outcomes of imports, in the order in which they were answered.
type Answers = Arc<Mutex<Vec<Result<(), Error>>>>;

fn import(request: u64, hand_over: HandOver, answers: &Answers) -> Event {
    let answers = Arc::clone(answers);
    let answer = Box::new(move |outcome| answers.lock().expect("no thread panicked").push(outcome));
    Event::Import(Import { key: key(request, 1), hand_over, answer })
}

fn arrived((run, data): Sent) -> Event {
    Event::Arrived(run, Source::Here(data))
}

/// Returns the run with the key that its request has on the decoding side.
fn there((run, data): Sent) -> Sent {
    (Run { key: key(run.key.request.0, 1), ..run }, data)
}

/// Moves all queued runs and exports from the prefilling side to the decoding side. Returns the exported requests.
fn carry(from: &Side, to: &Side, answers: &Answers) -> Vec<u64> {
    let mut connector = from.connector.lock();
    for run in connector.sent.drain(..) {
        to.give(arrived(there(run)));
    }
    let exported: Vec<_> = connector.exported.drain(..).collect();
    drop(connector);
    for (key, exported) in &exported {
        to.give(import(key.request.0, *exported, answers));
    }
    exported.iter().map(|(key, _)| key.request.0).collect()
}

/// Prefills a request, and returns its runs and its hand-over.
fn prefilled(side: &mut Side, whole: &pb::LaunchGraph) -> (Vec<Sent>, HandOver) {
    side.engine.launch(prefill(whole));
    side.idle();
    let mut connector = side.connector.lock();
    let (_, exported) = connector.exported.pop_front().expect("the prefill is done");
    (connector.sent.drain(..).map(there).collect(), exported)
}

#[test]
fn divided_requests_give_the_tokens_of_a_request_alone() {
    let admissions = [Admission::WholeLife, Admission::Optimistic];
    for (admission, in_flight) in
        admissions.into_iter().flat_map(|admission| InFlight::ALL.map(|in_flight| (admission, in_flight)))
    {
        let settings = EngineSettings { admission, ..settings() };
        let decoding = EngineSettings { kv_cache_memory: Some(ByteSize(41 * 64)), ..settings.clone() };
        let (mut from, mut to, answers) = (
            Side::in_flight(&settings, in_flight),
            Side::in_flight(&decoding, in_flight),
            Answers::default(),
        );
        // The prompts' lengths lie around multiples of pages and chunks. Some prompts share a prefix, so that some
        // pages are cached and some are sent.
        let launches: Vec<_> = (0..40)
            .map(|request| {
                let mut launch = launch(request, 1 + request as usize % 37, 2 + request as u32 % 20);
                if request % 3 == 0 {
                    launch.spec.as_mut().unwrap().prompt.splice(0..0, (0..9).map(|token| token * 3));
                }
                launch
            })
            .collect();
        launches.iter().for_each(|launch| to.engine.launch(decode(launch)));
        let mut spared = 0;
        for turn in 0.. {
            assert!(
                turn < 10_000,
                "{in_flight:?} {admission:?}: {} of {} ended, {:?} {:?} {:?}",
                to.outcomes.len(),
                launches.len(),
                from.load,
                to.load,
                to.outcomes
            );
            for (key, pages, known) in to.connector.lock().reserved.drain(..) {
                spared += known;
                let launch = &launches[key.request.0 as usize];
                let tokens = launch.spec.as_ref().unwrap().prompt.len();
                assert_eq!(pages, tokens.div_ceil(PAGE_TOKENS));
                from.engine.launch(prefill_behind(launch, known));
            }
            let (a, b) = (from.step(), to.step());
            for request in carry(&from, &to, &answers) {
                // The acceptance is delivered before the receiver handles the import, so that completions come in any
                // order.
                from.give(Event::Accepted(key(request, 0)));
            }
            if !a && !b && to.outcomes.len() == launches.len() {
                break;
            }
        }
        for launch in &launches {
            let request = launch.key.unwrap().request;
            let whole = [from.ids(request), to.ids(request)].concat();
            assert_eq!(whole, expected(launch).output, "request {request}");
            assert_eq!(from.ids(request).len(), 1);
            assert_eq!(to.tokens[&request][0].index, 1);
            let exported = pb::completion::Outcome::HandedOver(pb::HandedOver { generated: 1 });
            assert_eq!(from.outcomes[&request], exported);
            assert!(matches!(to.outcomes[&request], pb::completion::Outcome::Finished(_)));
        }
        assert!(answers.lock().unwrap().iter().all(Result::is_ok));
        assert_eq!((from.load.kv_pages_used, to.load.kv_pages_used), (0, 0));
        assert!(from.load.cached_tokens > 0, "some pages were found, not computed");
        assert!(spared > 0, "some pages were known, not sent");
        assert!(from.engine.is_idle() && to.engine.is_idle());
    }
}

#[test]
fn a_first_token_that_ends_the_request_ends_it_at_the_prefill() {
    let mut side = Side::new(&settings());
    let mut whole = launch(1, 10, 5);
    whole.spec.as_mut().unwrap().stopping.as_mut().unwrap().stop_token_ids = vec![expected(&whole).output[0]];
    side.engine.launch(prefill(&whole));
    side.idle();
    assert!(matches!(side.outcomes[&1], pb::completion::Outcome::Finished(_)));
    let connector = side.connector.lock();
    assert!(connector.exported.is_empty() && connector.ended == [key(1, 0)]);
}

#[test]
fn wrong_imports_are_refused_and_a_correct_one_is_still_accepted() {
    let (mut from, mut to, answers) = (Side::new(&settings()), Side::new(&settings()), Answers::default());
    let whole = launch(1, 18, 9);
    to.engine.launch(decode(&whole));
    to.idle();
    let (runs, exported) = prefilled(&mut from, &whole);
    let pages: Vec<Sent> = runs
        .iter()
        .flat_map(|(run, data)| {
            let page = |(index, data): (usize, &[u8])| {
                (Run { first: run.first + index, count: 1, ..*run }, data.to_vec())
            };
            data.chunks(PAGE_BYTES).enumerate().map(page).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(pages.len(), 5);
    // Send all pages but one, one page twice, a page beyond the request's end, and a page of an unknown request.
    for page in pages.iter().filter(|(run, _)| run.first != 2).chain([&pages[0]]) {
        to.give(arrived(page.clone()));
    }
    let (first, data) = pages[0].clone();
    to.give(arrived((Run { first: 5, ..first }, data.clone())));
    to.give(arrived((Run { key: key(7, 1), ..first }, data)));
    let refused = |to: &mut Side, change: &dyn Fn(&mut HandOver), why: &str| {
        let mut other = exported;
        change(&mut other);
        to.give(import(1, other, &answers));
        to.idle();
        let error = answers.lock().unwrap().pop().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(why), "{error}");
    };
    refused(&mut to, &|_| {}, "page 2 of 5 is missing");
    to.give(arrived(pages[2].clone()));
    refused(&mut to, &|hand_over| hand_over.pages = 4, "4 pages are handed over, but 5 are reserved");
    refused(
        &mut to,
        &|hand_over| hand_over.computed = 17,
        "17 tokens are handed over, but its prefill has 18",
    );
    let other = exported.first.map(|first| OutputToken { index: 1, ..first });
    refused(
        &mut to,
        &|hand_over| hand_over.first = other,
        "token 1 of its output is handed over, but 0 is due",
    );
    assert_eq!((to.ids(1), to.load.running), (vec![], 0), "no step has had a row of it");

    to.give(import(1, exported, &answers));
    to.step();
    to.step();
    // A repeated import and late pages have no effect.
    to.give(import(1, exported, &answers));
    to.give(arrived((first, vec![9; PAGE_BYTES])));
    to.idle();
    assert_eq!(to.ids(1), expected(&whole).output[1..]);
    let mut answers = answers.lock().unwrap().drain(..).collect::<Vec<_>>().into_iter();
    assert_eq!(answers.next(), Some(Ok(())));
    assert_eq!(answers.next().unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(to.load.kv_pages_used, 0);
}

#[test]
fn a_request_whose_pages_cannot_leave_waits_alone() {
    let mut side = Side::new(&settings());
    side.connector.lock().room = 0;
    let (long, short) = (launch(1, 200, 5), launch(2, 20, 5));
    side.engine.launch(prefill(&long));
    for _ in 0..20 {
        side.step();
    }
    let computed = side.load.steps;
    assert!(computed <= 3, "it went on for {computed} steps");
    side.engine.launch(short.clone());
    side.idle();
    assert_eq!(side.ids(2), expected(&short).output);
    // From now on, the connector has room for one page per step.
    while !side.outcomes.contains_key(&1) {
        side.connector.lock().room = PAGE_BYTES;
        side.step();
        if let Some((key, _)) = { side.connector.lock().exported.pop_front() } {
            side.give(Event::Accepted(key));
        }
    }
    let pages: Vec<usize> = side.connector.lock().sent.iter().map(|(run, _)| run.first).collect();
    assert_eq!(pages, (0..50).collect::<Vec<_>>());
    assert_eq!(side.ids(1), expected(&long).output[..1]);
}

#[test]
fn every_ending_frees_all_pages_once() {
    let outcomes = RefCell::new(vec![]);
    let check = |side: &mut Side, request| {
        side.idle();
        let outcome = side.outcomes[&request].clone();
        outcomes.borrow_mut().push(outcome);
        assert_eq!(side.load.kv_pages_used, 0);
        assert!(side.connector.lock().ended.contains(&key(request, u32::from(request > 10))));
        assert!(side.engine.is_idle());
    };
    // Two requests wait for planes on the decoding side. One is cancelled, and the transfer of the other fails.
    let mut to = Side::new(&settings());
    for request in [11, 12] {
        to.engine.launch(decode(&launch(request, 30, 5)));
        to.idle();
    }
    assert_eq!(to.connector.lock().reserved.len(), 2);
    to.engine.cancel(key(11, 1));
    to.give(Event::Failed(key(12, 1), TransferError::Lost("gone".into())));
    to.idle();
    check(&mut to, 11);
    check(&mut to, 12);
    // On the prefilling side, request 1 fails before its pages are sent. Requests 2 to 4 are exported, so their pages
    // are free. Then request 2 is cancelled, the transfer of request 3 fails, and request 4 is accepted.
    let mut from = Side::new(&settings());
    from.connector.lock().room = 0;
    from.engine.launch(prefill(&launch(1, 30, 5)));
    from.idle();
    from.give(Event::Failed(key(1, 0), TransferError::Refused("no".into())));
    check(&mut from, 1);
    from.connector.lock().room = usize::MAX;
    for request in [2, 3, 4] {
        from.engine.launch(prefill(&launch(request, 30, 5)));
        from.idle();
        assert!(!from.engine.is_idle() && !from.outcomes.contains_key(&request));
    }
    from.engine.cancel(key(2, 0));
    from.give(Event::Failed(key(3, 0), TransferError::Lost("gone".into())));
    from.give(Event::Accepted(key(4, 0)));
    from.idle();
    for request in [2, 3, 4] {
        let outcome = from.outcomes[&request].clone();
        outcomes.borrow_mut().push(outcome);
    }
    assert!(from.engine.is_idle());
    use pb::completion::Outcome::{Cancelled, Failed, HandedOver, HandoverFailed};
    let outcomes = outcomes.into_inner();
    assert!(
        matches!(
            &outcomes[..],
            [Cancelled(_), HandoverFailed(_), Failed(_), Cancelled(_), HandoverFailed(_), HandedOver(_)]
        ),
        "{outcomes:?}"
    );
}

#[test]
fn a_deadline_ends_a_request_that_waits_for_planes_while_no_step_runs() {
    let mut to = Side::new(&settings());
    to.engine.launch(pb::LaunchGraph { timeout_ms: Some(20), ..decode(&launch(11, 30, 5)) });
    while to.outcomes.is_empty() {
        if !to.step() {
            assert!(to.device.wait());
        }
    }
    assert_eq!(to.load.kv_pages_used, 0);
    assert!(matches!(&to.outcomes[&11], pb::completion::Outcome::DeadlineExceeded(_)));
}

#[test]
fn requests_that_cannot_be_divided_are_refused() {
    let mut side = Side::new(&settings());
    let whole = launch(1, 10, 5);
    let both = pb::LaunchGraph { receive: decode(&whole).receive, ..prefill(&whole) };
    let wrong_walks = pb::LaunchGraph { walks: vec![PREFILL, DECODE], ..decode(&launch(12, 10, 5)) };
    let mut no_secret = prefill(&launch(3, 10, 5));
    no_secret.send_to.as_mut().unwrap().secret = vec![1; 15];
    let too_long = decode(&launch(14, CONTEXT, 5));
    for launch in [both, wrong_walks, no_secret, too_long] {
        side.engine.launch(launch);
    }
    side.idle();
    let refused = |outcome: &pb::completion::Outcome| matches!(outcome, pb::completion::Outcome::Refused(_));
    assert!(side.outcomes.len() == 4 && side.outcomes.values().all(refused), "{:?}", side.outcomes);
    assert_eq!(side.connector.lock().ended.len(), 4, "the connector learns of every refusal");
    // Without a connector, every divided request is refused.
    let (mut device, mut engine) = engine(&settings()).0.split();
    engine.launch(prefill(&whole));
    let report = engine.report(device.turn().unwrap().unwrap());
    assert!(refused(report.completions[0].outcome.as_ref().unwrap()));
}
