//! The tables of a request's states in docs/, produced by driving the machine through each transition.
//!
//! Every row of a table has an event, and the stages in which the event may occur. The machine determines the next
//! stage and the consequence, which must be the same for all these stages. Two markers on the page enclose each table.

use std::{fs, path::Path, time::Instant};

use tutti_proto::Rank;
use tutti_runtime::ErrorKind;

use super::{
    super::*,
    disaggregated::{handed_over, handover_failed, room, said},
    replay::{accepted, finish, row},
};

const EARLIER: WorkerId = WorkerId(1);
const GRAPH: [WorkerId; 2] = [WorkerId(3), WorkerId(4)];
const DECODE: [WorkerId; 2] = [WorkerId(5), WorkerId(6)];
const ENCODER: WorkerId = WorkerId(7);
const STRANGER: WorkerId = WorkerId(9);

/// A request in some stage. A worker still holds a graph of the request's first try, which was lost.
struct Case {
    request: Request,
    /// The client's receiver, kept open.
    _receiver: mailbox::Receiver,
    /// Graph of the first try.
    earlier: Option<pb::GraphKey>,
    /// The graph that prefills, at `GRAPH`.
    graph: Option<pb::GraphKey>,
    /// The decode, at `DECODE`.
    decode: Option<pb::GraphKey>,
    encoder: Option<pb::GraphKey>,
}

/// The machine's answer to an event.
#[derive(Default)]
struct Answer {
    launch: Option<pb::LaunchGraph>,
    effects: Effects,
    row: Option<RowOutcome>,
}

impl From<Option<pb::LaunchGraph>> for Answer {
    fn from(launch: Option<pb::LaunchGraph>) -> Self {
        assert!(launch.is_some(), "no graph was launched");
        Self { launch, ..Self::default() }
    }
}

impl From<Effects> for Answer {
    fn from(effects: Effects) -> Self {
        Self { effects, ..Self::default() }
    }
}

impl From<RowOutcome> for Answer {
    fn from(row: RowOutcome) -> Self {
        Self { row: Some(row), ..Self::default() }
    }
}

/// One row of a table before the machine has answered.
struct Transition {
    stages: &'static [&'static str],
    event: &'static str,
    /// Tries that are left after the current one.
    tries_left: u32,
    act: fn(&mut Case) -> Answer,
}

const fn on(
    stages: &'static [&'static str],
    event: &'static str,
    act: fn(&mut Case) -> Answer,
) -> Transition {
    Transition { stages, event, tries_left: 1, act }
}

const fn on_last_try(
    stages: &'static [&'static str],
    event: &'static str,
    act: fn(&mut Case) -> Answer,
) -> Transition {
    Transition { stages, event, tries_left: 0, act }
}

const PLACED: &[&str] = &["Reserving", "Prefilling", "Running"];
const ALL: &[&str] = &["Waiting", "Reserving", "Prefilling", "Running", "Ended"];

const REQUEST: &[Transition] = &[
    on(&["Waiting"], "a worker for the whole request is found, or for a prefill without a decode", |case| {
        case.request.launch(GraphRole::Whole, members(GRAPH), Instant::now()).into()
    }),
    on(&["Waiting"], "a worker for the decode is found", |case| {
        case.request.launch(GraphRole::Decode, members(DECODE), Instant::now()).into()
    }),
    on(&["Waiting"], "cancelled by the client", |case| case.request.end_early(Ending::Cancelled).into()),
    on(&["Waiting"], "the deadline passes", expire),
    on(&["Waiting"], "no worker is expected", |case| {
        case.request.end_early(Ending::Failed(Error::unavailable("no worker"))).into()
    }),
    on(&["Reserving"], "`Reserved` by the leader, and a worker for the prefill is ready", |case| {
        assert_eq!(case.request.check_reserved(DECODE[0], case.decode.unwrap().into()), Ok(RoomFor::Planes));
        case.request.launch_prefill(members(GRAPH), room(), Instant::now()).into()
    }),
    on(&["Reserving"], "`Reserved` by the leader, and no worker for the prefill is ready", |case| {
        case.request.give_room_back().into()
    }),
    on(&["Prefilling"], "a row of the prefill", |case| {
        case.request.on_row(GRAPH[0], row(case.graph, 0, 0)).into()
    }),
    on(&["Prefilling"], "a row of the decode before the prefill's token", |case| {
        case.request.on_row(DECODE[0], row(case.decode, 0, 1)).into()
    }),
    on(&["Prefilling"], "finished by the last rank of the decode", |case| {
        case.request.on_completion(DECODE[0], finish(case.decode, 9, 0, 2));
        case.request.on_completion(DECODE[1], finish(case.decode, 9, 1, 2)).into()
    }),
    on(&["Prefilling"], "handed over by the last rank of the prefill", |case| {
        case.request.on_row(GRAPH[0], row(case.graph, 0, 0));
        hand_over_twice(case)
    }),
    on(&["Prefilling"], "handed over, but tokens are missing", hand_over_twice),
    on(&["Prefilling"], "finished by the last rank of the prefill: the first token was the last", |case| {
        case.request.on_row(GRAPH[0], row(case.graph, 0, 0));
        case.request.on_completion(GRAPH[0], finish(case.graph, 9, 0, 1));
        case.request.on_completion(GRAPH[1], finish(case.graph, 9, 1, 1)).into()
    }),
    on(&["Running"], "a row with the next token", |case| {
        case.request.on_row(GRAPH[0], row(case.graph, 0, 0)).into()
    }),
    on(&["Prefilling", "Running"], "a row that leaves a gap", |case| {
        case.request.on_row(GRAPH[0], row(case.graph, 0, 1)).into()
    }),
    on(&["Running"], "finished by a rank, others are pending", |case| {
        case.request.on_completion(GRAPH[1], finish(case.graph, 9, 1, 1)).into()
    }),
    on(&["Running"], "finished by the last rank", |case| {
        case.request.on_row(GRAPH[0], row(case.graph, 0, 0));
        case.request.on_completion(GRAPH[1], finish(case.graph, 9, 1, 1));
        case.request.on_completion(GRAPH[0], finish(case.graph, 9, 0, 1)).into()
    }),
    on(&["Running"], "finished, but the ranks or the token counts disagree", |case| {
        case.request.on_completion(GRAPH[1], finish(case.graph, 9, 1, 1));
        case.request.on_completion(GRAPH[0], finish(case.graph, 9, 0, 2)).into()
    }),
    on(PLACED, "another worker can begin sooner what has not begun", |case| case.request.move_on().into()),
    on(PLACED, "failed by a rank", |case| {
        let fault = Error::internal("a fault").into();
        complete(case, pb::completion::Outcome::Failed(fault))
    }),
    on(PLACED, "refused by a rank", |case| {
        let fault = Error::invalid("prompt", "is too long").into();
        complete(case, pb::completion::Outcome::Refused(fault))
    }),
    on(PLACED, "a worker is lost, tries are left", lose),
    on_last_try(PLACED, "a worker is lost, no try is left", lose),
    on(PLACED, "a hand-over fails, tries are left", fail_handover),
    on_last_try(PLACED, "a hand-over fails, no try is left", |case| {
        case.request.failed_handovers = case.request.max_replays;
        fail_handover(case)
    }),
    on(&["Prefilling"], "a worker is lost, but a rank has finished and all tokens are here", finish_and_lose),
    on(&["Running"], "a worker is lost, but a rank has finished and all tokens are here", finish_and_lose),
    on(PLACED, "cancelled by the client", |case| case.request.end_early(Ending::Cancelled).into()),
    on(PLACED, "the deadline passes", expire),
    on(ALL, "a row of another try, graph or worker, or one received before", |case| {
        case.request.on_row(STRANGER, row(case.graph, 0, 0));
        case.request.on_row(EARLIER, row(case.earlier, 0, 0)).into()
    }),
    on(ALL, "a stale, duplicate or unknown completion", |case| {
        case.request.on_completion(STRANGER, finish(case.earlier, 9, 0, 1)).into()
    }),
    on(ALL, "a completion of a run that is over for the client", |case| {
        let cancelled = pb::completion::Outcome::Cancelled(pb::CancelledOutcome {});
        case.request.on_completion(EARLIER, said(case.earlier, cancelled)).into()
    }),
    on(ALL, "the worker of a run that is over for the client is lost", |case| {
        case.request.on_worker_lost(EARLIER, "killed").into()
    }),
];

const ENCODING: &[Transition] = &[
    on(&["Over"], "the graph that prefills is launched, and there are media", |case| {
        case.request.launch(GraphRole::Whole, members(GRAPH), Instant::now()).into()
    }),
    on(&["Due"], "`Reserved` by that graph's leader, and an encoder is ready", |case| {
        assert_eq!(
            case.request.check_reserved(GRAPH[0], case.graph.unwrap().into()),
            Ok(RoomFor::Embeddings)
        );
        case.request.launch_encode(Members::from([(Rank(0), ENCODER)]), room(), Instant::now()).into()
    }),
    on(&["Due"], "`Reserved` by that graph's leader, and no encoder is ready", |case| {
        case.request.give_room_back().into()
    }),
    on(&["Running"], "handed over by the encoder", |case| {
        case.request.on_completion(ENCODER, handed_over(case.encoder, 0)).into()
    }),
    on(&["Running"], "finished by the encoder without a hand-over", |case| {
        case.request.on_completion(ENCODER, finish(case.encoder, 9, 0, 0)).into()
    }),
    on(&["Running"], "the encoder's worker is lost, tries are left", |case| {
        case.request.on_worker_lost(ENCODER, "killed").into()
    }),
    on(&["Due", "Running"], "the request ends", |case| case.request.end_early(Ending::Cancelled).into()),
    on(&["Due", "Running"], "the request starts over", lose),
];

fn members(workers: [WorkerId; 2]) -> Members {
    Members::from([(Rank(0), workers[0]), (Rank(1), workers[1])])
}

/// The workers and the key of the graph that prefills; those of the decode if no graph prefills yet.
fn first_graph(case: &Case) -> ([WorkerId; 2], Option<pb::GraphKey>) {
    if case.graph.is_some() { (GRAPH, case.graph) } else { (DECODE, case.decode) }
}

fn complete(case: &mut Case, outcome: pb::completion::Outcome) -> Answer {
    let (workers, key) = first_graph(case);
    case.request.on_completion(workers[0], said(key, outcome)).into()
}

fn lose(case: &mut Case) -> Answer {
    let workers = first_graph(case).0;
    case.request.on_worker_lost(workers[1], "killed").into()
}

fn finish_and_lose(case: &mut Case) -> Answer {
    case.request.on_row(GRAPH[0], row(case.graph, 0, 0));
    case.request.on_completion(GRAPH[0], finish(case.graph, 9, 0, 1));
    case.request.on_worker_lost(GRAPH[1], "killed").into()
}

fn fail_handover(case: &mut Case) -> Answer {
    let (workers, key) = first_graph(case);
    case.request.on_completion(workers[0], handover_failed(key)).into()
}

fn expire(case: &mut Case) -> Answer {
    let error = Error::new(ErrorKind::DeadlineExceeded, "the deadline has passed");
    case.request.end_early(Ending::Failed(error)).into()
}

fn hand_over_twice(case: &mut Case) -> Answer {
    let second = pb::Completion { rank: 1, ..handed_over(case.graph, 1) };
    case.request.on_completion(GRAPH[1], second);
    case.request.on_completion(GRAPH[0], handed_over(case.graph, 1)).into()
}

impl Case {
    /// A request whose first try was lost. It waits for its second placement.
    fn waiting(tries_left: u32) -> Self {
        let (mut request, receiver) = accepted(1 + tries_left);
        let first = Members::from([(Rank(0), EARLIER), (Rank(1), WorkerId(2))]);
        let earlier = request.launch(GraphRole::Whole, first, Instant::now()).unwrap().key;
        assert!(request.on_worker_lost(WorkerId(2), "killed").replayed);
        Self { request, _receiver: receiver, earlier, graph: None, decode: None, encoder: None }
    }

    fn in_stage(stage: &str, tries_left: u32) -> Self {
        let mut case = Self::waiting(tries_left);
        let request = &mut case.request;
        if matches!(stage, "Reserving" | "Prefilling") {
            case.decode = request.launch(GraphRole::Decode, members(DECODE), Instant::now()).unwrap().key;
        }
        if stage == "Prefilling" {
            case.graph = request.launch_prefill(members(GRAPH), room(), Instant::now()).unwrap().key;
        }
        if matches!(stage, "Running" | "Ended") {
            case.graph = request.launch(GraphRole::Whole, members(GRAPH), Instant::now()).unwrap().key;
        }
        if stage == "Ended" {
            request.end_early(Ending::Cancelled);
        }
        assert_eq!(stage_of(&case.request), stage);
        case
    }

    fn in_encoding(state: &str, tries_left: u32) -> Self {
        let mut case = Self::waiting(tries_left);
        let request = &mut case.request;
        request.encoders = vec![WalkId(7)];
        if state != "Over" {
            case.graph = request.launch(GraphRole::Whole, members(GRAPH), Instant::now()).unwrap().key;
        }
        if state == "Running" {
            let encoder = Members::from([(Rank(0), ENCODER)]);
            case.encoder = request.launch_encode(encoder, room(), Instant::now()).unwrap().key;
        }
        assert_eq!(encoding_of(&case.request), state);
        case
    }
}

fn stage_of(request: &Request) -> &'static str {
    match &request.phase {
        Phase::Ended => "Ended",
        Phase::Live { stage: Stage::Waiting, .. } => "Waiting",
        Phase::Live { stage: Stage::Reserving { .. }, .. } => "Reserving",
        Phase::Live { stage: Stage::Prefilling { .. }, .. } => "Prefilling",
        Phase::Live { stage: Stage::Running { .. }, .. } => "Running",
    }
}

fn encoding_of(request: &Request) -> &'static str {
    match &request.phase {
        Phase::Ended | Phase::Live { encoding: Encoding::Over, .. } => "Over",
        Phase::Live { encoding: Encoding::Due, .. } => "Due",
        Phase::Live { encoding: Encoding::Running(_), .. } => "Running",
    }
}

/// An answer in words.
fn consequence(answer: Answer) -> String {
    let mut words: Vec<String> = Vec::new();
    if let Some(launch) = &answer.launch {
        let fields = [
            (launch.receive.is_some(), "`receive`"),
            (launch.send_to.is_some(), "`send_to`"),
            (launch.receive_media.is_some(), "`receive_media`"),
        ];
        let fields: Vec<&str> = fields.into_iter().filter(|(set, _)| *set).map(|(_, field)| field).collect();
        let with = if fields.is_empty() { String::new() } else { format!(" with {}", fields.join(", ")) };
        words.push(format!("`LaunchGraph` to every rank{with}"));
    }
    let mut effects = answer.effects;
    if let Some(row) = answer.row {
        match (row.taken, row.dropped) {
            (0, 0) => words.push("the row is kept for later".into()),
            (0, _) if row.effects.ended.is_none() => words.push("dropped and counted".into()),
            (0, _) => {}
            _ => words.push("the tokens go to the mailbox".into()),
        }
        effects = row.effects;
    }
    match effects.ended {
        Some(EndingKind::Finished) => words.push("finished".into()),
        Some(EndingKind::Cancelled) => words.push("cancelled".into()),
        Some(EndingKind::Failed(kind)) => words.push(format!("failed: {}", kind.label())),
        Some(EndingKind::Refused(kind)) => words.push(format!("refused: {}", kind.label())),
        None => {}
    }
    match (effects.needs_placement, effects.replayed) {
        (true, true) => words.push("replay: the next incarnation".into()),
        (true, false) => words.push("the next incarnation, which is no replay".into()),
        (false, replayed) => assert!(!replayed),
    }
    if !effects.begun.is_empty() {
        words.push("the graph that waited for it begins".into());
    }
    if !effects.cancel.is_empty() {
        words.push("`CancelGraph` to the ranks that still run".into());
    }
    if effects.dropped.is_some() {
        words.push("dropped and counted".into());
    }
    if words.is_empty() {
        assert!(!effects.released.is_empty(), "the event has no consequence");
        words.push("the rank's share is released".into());
    }
    words.join("; ")
}

/// A table of these transitions in Markdown.
fn table(
    head: &str,
    transitions: &[Transition],
    case_in: fn(&str, u32) -> Case,
    state_of: fn(&Request) -> &'static str,
) -> String {
    let mut text = format!("| {head} | event | next | consequence |\n|---|---|---|---|\n");
    for Transition { stages, event, tries_left, act } in transitions {
        let answers: Vec<(String, String)> = stages
            .iter()
            .map(|stage| {
                let mut case = case_in(stage, *tries_left);
                let answer = act(&mut case);
                let next = state_of(&case.request);
                let next = if next == *stage { "same" } else { next };
                (next.to_owned(), consequence(answer))
            })
            .collect();
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{event} differs by stage: {answers:?}");
        let (next, consequence) = &answers[0];
        text.push_str(&format!("| {} | {event} | {next} | {consequence} |\n", stages.join(", ")));
    }
    text
}

/// The text between the markers of a topic, on the page in docs/ that has them.
fn documented(topic: &str) -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let (start, end) = (format!("<!-- {topic} -->\n"), format!("<!-- end of {topic} -->"));
    let pages = fs::read_dir(docs).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let mut found = pages.filter_map(|path| {
        let text = fs::read_to_string(path).unwrap();
        let (_, rest) = text.split_once(&start)?;
        Some(rest.split_once(&end).unwrap().0.to_owned())
    });
    let text = found.next().unwrap_or_else(|| panic!("no page in docs/ has {start}"));
    assert_eq!(found.next(), None, "two pages in docs/ have {start}");
    text
}

#[test]
fn the_documented_stages_are_those_of_the_machine() {
    let table = table("stage", REQUEST, Case::in_stage, stage_of);
    assert!(documented("request stages") == table, "docs/ differ from the machine, which takes:\n{table}");
}

#[test]
fn the_documented_states_of_encoding_are_those_of_the_machine() {
    let table = table("encoding", ENCODING, Case::in_encoding, encoding_of);
    assert!(documented("encoding states") == table, "docs/ differ from the machine, which takes:\n{table}");
}
