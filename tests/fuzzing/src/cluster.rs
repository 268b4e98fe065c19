//! Messages among the processes of a cluster.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use prost::Message;
use tutti_conductor::fuzzing::{Event, play};
use tutti_proto::{
    cluster::v1::{self as pb, worker_message::Message as FromWorker},
    declaration::ModelDeclaration,
};

use crate::input::Input;

/// Maximum number of events in an input of the whole cluster.
const MAX_EVENTS: usize = 64;

/// Runs one input: events of a cluster, or a message of one kind.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    match input.byte() % 5 {
        0 => {
            let shape = input.byte();
            play(shape, events(input));
        }
        1 => push(input),
        2 => {
            if let Ok(message) = pb::ConductorMessage::decode(input.0) {
                tutti_worker::fuzzing::conductor_message(message);
            }
        }
        3 => declaration(input.0),
        _ => {
            let (ranks, count) = (input.byte(), input.byte() % 5);
            let planes: Vec<_> =
                (0..count).map(|_| (input.byte() & 1 == 1, input.byte(), input.byte())).collect();
            tutti_models::fuzzing::page_layout(&planes, ranks, input.0);
        }
    }
}

fn events(mut input: Input<'_>) -> Vec<Event> {
    let mut events = Vec::new();
    while !input.is_empty() && events.len() < MAX_EVENTS {
        let (kind, rank) = (input.byte(), input.byte());
        let decoded = |input: &mut Input<'_>| pb::WorkerMessage::decode(input.piece()).ok()?.message;
        match kind % 11 {
            0 => events.push(Event::Join(rank.into())),
            1 => events
                .extend([Event::Join(rank.into()), Event::Says(rank.into(), FromWorker::Ready(ready()))]),
            2 => events.extend(decoded(&mut input).map(|message| Event::Says(rank.into(), message))),
            3 => {
                let back = input.byte();
                events.extend(
                    decoded(&mut input).map(|message| Event::SaysOfGraph(rank.into(), back, message)),
                );
            }
            4 => events.push(Event::Leaves(rank.into())),
            5 => events.push(Event::Submit(spec(rank), Vec::new())),
            6 => {
                let request = pb::SubmitRequest::decode(input.piece());
                events.extend(request.ok().map(|r| Event::Submit(r.spec.unwrap_or_default(), r.generated)));
            }
            7 => events.push(Event::Cancel(rank)),
            8 => events.push(Event::Read),
            9 => {
                let (back, epoch, count) = (input.byte(), input.byte(), input.byte() % 8);
                let report = pb::StepReport { rows: vec![row(epoch, count)], ..Default::default() };
                events.push(Event::SaysOfGraph(rank.into(), back, FromWorker::StepReport(report)));
            }
            _ => {
                let (back, epoch, generated) = (input.byte(), input.byte(), input.byte());
                let completions = vec![completion(kind, epoch, generated)];
                let report = pb::StepReport { completions, ..Default::default() };
                events.push(Event::SaysOfGraph(rank.into(), back, FromWorker::StepReport(report)));
            }
        }
    }
    events
}

/// Returns the `Ready` message of a worker that has loaded the model.
pub fn ready() -> pb::Ready {
    pb::Ready { model: Some(tutti_router::fuzzing::model()), kv_pages_total: 100, ..Default::default() }
}

/// Returns a request for up to `max_tokens` tokens.
pub fn spec(max_tokens: u8) -> pb::RequestSpec {
    pb::RequestSpec {
        prompt: vec![1, 2, 3],
        sampling: Some(pb::SamplingParams::GREEDY),
        stopping: Some(pb::Stopping { max_tokens: max_tokens.into(), ..Default::default() }),
        ..Default::default()
    }
}

fn row(epoch: u8, tokens: u8) -> pb::RowReport {
    let token = pb::SampledToken { token_id: 7, index: 0, logprob: None };
    pb::RowReport { epoch: epoch.into(), tokens: vec![token; tokens.into()], ..Default::default() }
}

fn completion(kind: u8, epoch: u8, generated: u8) -> pb::Completion {
    use pb::completion::Outcome;
    let fault = || pb::Fault { message: "broken".into(), ..Default::default() };
    let outcome = match kind / 11 % 7 {
        0 => Outcome::Finished(pb::Finished {
            reason: pb::FinishReason::Length.into(),
            generated: generated.into(),
            ..Default::default()
        }),
        1 => Outcome::Cancelled(pb::CancelledOutcome {}),
        6 => Outcome::DeadlineExceeded(pb::DeadlineOutcome {}),
        2 => Outcome::Failed(fault()),
        3 => Outcome::Refused(fault()),
        4 => Outcome::HandedOver(pb::HandedOver { generated: generated.into() }),
        _ => Outcome::HandoverFailed(fault()),
    };
    pb::Completion { epoch: epoch.into(), outcome: Some(outcome), ..Default::default() }
}

/// Checks a model's declaration: if it is accepted, it survives encoding and decoding, and the sums of its sizes do not
/// overflow.
fn declaration(data: &[u8]) {
    let Ok(message) = pb::ModelDeclaration::decode(data) else { return };
    let Ok(declaration) = ModelDeclaration::try_from(message) else { return };
    let again = ModelDeclaration::try_from(pb::ModelDeclaration::from(&declaration));
    assert_eq!(again.as_ref(), Ok(&declaration));
    assert!(declaration.page_bytes().checked_add(declaration.slot_bytes()).is_some());
    for walk in declaration.walks() {
        assert!(walk.nodes.iter().all(|node| (node.0 as usize) < declaration.nodes().len()));
        assert!(walk.kind.batched_by().is_none_or(|by| declaration.walk(by).is_some()));
    }
    for input in declaration.media() {
        let runs = vec![pb::MediaRun { first: 0, tokens: u32::MAX }];
        let item = pb::MediaItem { kind: input.kind.into(), runs, ..Default::default() };
        let calls = declaration.encoder_calls(&[item.clone(), item]);
        assert!(calls.is_err() || input.max_call_tokens.is_none_or(|most| most == u32::MAX));
    }
}

fn push(mut input: Input<'_>) {
    let kind = input.byte();
    let mut frames = VecDeque::new();
    while !input.is_empty() {
        let message = tutti_transfer::fuzzing::sealed(input.piece());
        // gRPC's prefix of a message: the byte 0 for "not compressed", and the length.
        frames.push_back([&[0], &(message.len() as u32).to_be_bytes()[..], &message].concat().into());
    }
    tutti_transfer::fuzzing::push(kind, Frames(frames));
}

/// A request body of these frames.
struct Frames(VecDeque<Bytes>);

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|bytes| Ok(Frame::data(bytes))))
    }
}
