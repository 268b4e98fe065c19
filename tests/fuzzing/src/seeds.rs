//! Seeds made from encoded messages and from the table of families.

use std::path::Path;

use prost::Message;
use tutti_conductor::config::{ConductorSettings, DeviceChoice, Layout, worker_settings};
use tutti_proto::{cluster::v1 as pb, v1};

use crate::cluster;

/// An input from which a fuzzer starts.
#[derive(Clone, Debug)]
pub struct Seed {
    /// Name of the target.
    pub target: &'static str,
    /// The bytes of the input.
    pub input: Vec<u8>,
}

/// Constraints, each with the byte of its name; see `tutti_router::fuzzing::constraint`.
const CONSTRAINTS: [(u8, &str); 26] = [
    (0, r#"{"type": "json_object"}"#),
    (
        0,
        r#"{"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {"type": "object"}}}"#,
    ),
    (
        0,
        r#"{"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "<"}]}"#,
    ),
    (1, r#"{"json": {"enum": ["a", 1, null]}, "whitespace": "compact"}"#),
    (1, r#"{"regex": "a+", "disable_any_whitespace": true}"#),
    (1, r#"{"choice": ["a", "b"], "whitespace_pattern": "\\s*"}"#),
    (1, r#"{"grammar": "start: \"a\" | \"b\""}"#),
    (
        2,
        r#"{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}"#,
    ),
    (
        2,
        r##"{"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/t"}}]}}}"##,
    ),
    (2, r#"{"patternProperties": {"^x": {"format": "date"}}, "propertyNames": {"pattern": "a"}}"#),
    (3, r#"{"allOf": [{"minimum": 3}, {"maximum": 2, "type": "number"}]}"#),
    (
        4,
        r#"{"triggers": ["a<think>"], "structures": [{"begin": "a<think>", "schema": true, "end": "<|role|>"}]}"#,
    ),
    (5, r#"["yes", "no", "<|end|>", "a|b"]"#),
    (6, r#"{"guided_regex": "a", "guided_whitespace_pattern": ""}"#),
    (
        7,
        r#"{"type": "object", "properties": {"a": {"type": ["string", "null"], "maxLength": 3}}, "required": ["a"], "additionalProperties": false}"#,
    ),
    (8, r#"{"oneOf": [{"type": "integer"}, {"type": "number"}], "not": {}, "uniqueItems": true}"#),
    (8, r#"{"type": "array", "prefixItems": [{"const": 1}], "minItems": 18446744073709551615}"#),
    (8, r#"{"type": "string", "pattern": "^(a|b)*c{3,}$", "minLength": 2}"#),
    (9, r"[01]*1[01]{30}"),
    (9, r"\p{L}{1,5000}(?i:x)[^\s]"),
    (9, "((a{1,100}){1,100}){1,100}"),
    (10, "yes\nno\nmay be"),
    (11, "start: \"a\" start"),
    (11, "start: (<[263]> /(.|\\n)*/ <|role|>)? a\na[lazy]: /.*/ \"!\"\nb: %json {\"type\": \"null\"}"),
    (11, "start: call* tail\ntail: /.*/\ncall[stop=\"x\", max_tokens=3]: /[a-w]*/ <[0-200]>"),
    (11, "%import common.WORD\nstart: WORD ~ 2..5"),
];

/// Returns the seeds of all targets.
pub fn made_seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut seed = |target, parts: &[&[u8]]| seeds.push(Seed { target, input: parts.concat() });
    for request in requests() {
        seed("grpc", &[&piece(b"10S"), &request.encode_to_vec()]);
    }
    let says = |message| pb::WorkerMessage { message: Some(message) }.encode_to_vec();
    use pb::worker_message::Message as From;
    let load = pb::WorkerLoad { steps: 3, ..Default::default() };
    let reserved = pb::Reserved { port: 9, layout_hash: 1, known_pages: 1, ..Default::default() };
    let listening = pb::GroupListening { port: 9, ..Default::default() };
    for (shape, message) in (0..).zip([
        From::Heartbeat(pb::Heartbeat { load: Some(load), forwards: 9, ..Default::default() }),
        From::LoadProgress(pb::LoadProgress { bytes_done: 5, bytes_total: 9 }),
        From::Reserved(reserved.clone()),
        From::Leaving(pb::Leaving {}),
        From::GroupListening(listening),
        From::LoadFailed(pb::LoadFailed {
            fault: Some(pb::Fault { message: "no".into(), ..Default::default() }),
        }),
        From::Ready(cluster::ready()),
    ]) {
        let message = piece(&says(message));
        let joins = [1, 0, 1, 1, 1, 2];
        let rest = [5, 9, 2, 1];
        // Events: two steps, a finished request, and a client that reads.
        let steps = [9, 0, 0, 0, 1, 9, 1, 0, 0, 1, 9, 2, 0, 0, 1, 10, 0, 0, 1, 9, 8, 0, 4, 1];
        seed("cluster", &[&[0, shape], &joins, &rest, &message, &[3, 2, 0], &message, &steps]);
    }
    let reserve = piece(&says(From::Reserved(reserved)));
    let handed = [9, 0, 0, 0, 1, 54, 0, 0, 1, 1, 9, 1, 0, 1, 3, 9, 2, 0, 1, 3, 8, 0];
    seed("cluster", &[&[0, 1, 1, 0, 1, 1, 1, 2, 5, 9], &[3, 1, 0], &reserve, &[3, 2, 0], &reserve, &handed]);
    for kind in 0..12 {
        seed("cluster", &[&[1, kind], &transfer(kind)]);
    }
    for message in conductor_messages() {
        seed("cluster", &[&[2], &pb::ConductorMessage { message: Some(message) }.encode_to_vec()]);
    }
    let declaration = cluster::ready().model.and_then(|model| model.declaration).unwrap_or_default();
    seed("cluster", &[&[3], &declaration.encode_to_vec()]);
    seed("cluster", &[&[4, 1, 2, 0, 2, 3, 1, 1, 5], &[7; 200]]);
    for (name, text) in CONSTRAINTS {
        seed("schema", &[&[name], &piece(text.as_bytes()), &[7, 1, 200, 3, 0, 90, 14, 5, 33]]);
    }
    for config in tutti_models::fuzzing::configs() {
        seed("config", &[&[0], config.as_bytes()]);
    }
    seeds
}

/// Returns a piece of an input: the length and the bytes.
fn piece(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_le_bytes(), bytes].concat()
}

fn requests() -> Vec<v1::GenerateRequest> {
    use v1::generate_request::Prompt;
    let chat = v1::Chat { messages: vec![v1::ChatMessage { role: "user".into(), content: "hello".into() }] };
    let prompts = [
        Prompt::Text("hello".into()),
        Prompt::TokenIds(v1::TokenIds { ids: vec![1, 2] }),
        Prompt::Chat(chat),
    ];
    let request = |prompt| v1::GenerateRequest {
        model: "tiny".into(),
        prompt: Some(prompt),
        n: Some(2),
        sampling: Some(v1::Sampling {
            temperature: Some(0.5),
            top_p: Some(0.9),
            logit_bias: [(3, 1.0)].into_iter().collect(),
            ..Default::default()
        }),
        stopping: Some(v1::Stopping { max_tokens: Some(5), stop: vec!["x".into()], ..Default::default() }),
        output: Some(v1::Output { logprobs: Some(2), echo: true, ..Default::default() }),
        priority: 1,
        timeout_ms: Some(100),
        ..Default::default()
    };
    let media = v1::Media {
        kind: v1::media::Kind::Audio.into(),
        format: "wav".into(),
        data: vec![1; 9],
        ..Default::default()
    };
    let text = Prompt::Text("a<think>b".into());
    let mut all: Vec<_> = prompts.into_iter().map(request).collect();
    all.push(v1::GenerateRequest { media: vec![media], n: None, ..request(text) });
    all
}

/// Returns the pieces of a push of KV pages that the receiver accepts.
fn transfer(kind: u8) -> Vec<u8> {
    use pb::{plane_data::Place, plane_piece::Piece};
    let (has_slot, share) = (kind & 4 != 0, kind % 3 == 2);
    let (first, unit, slot) = match kind % 3 {
        0 => (1, 8, 6),
        1 => (0, 8, 0),
        _ => (1, 4, 3),
    };
    let count = 5 - first;
    let counts = if has_slot && slot > 0 { vec![5, 1] } else { vec![5] };
    let plane = |name: &str, unit_bytes| pb::TransferPlane { name: name.into(), unit_bytes };
    let planes = if kind % 3 == 1 { vec![] } else { vec![plane("kv", 8), plane("state", 6)] };
    let manifest = pb::TransferManifest {
        layout_hash: tutti_transfer::fuzzing::layout_id(kind),
        counts: counts.clone(),
        planes: planes.into_iter().take(1 + usize::from(has_slot)).collect(),
        ranks: if share { 2 } else { 0 },
        rank: u32::from(share),
        ..Default::default()
    };
    let data = |kind, first, count, bytes| {
        let place = Some(Place::Inline(vec![3; bytes]));
        Piece::Data(pb::PlaneData { kind, first, count, place, checksum: 0 })
    };
    let mut pieces = vec![Piece::Manifest(manifest), data(0, first, count, (count * unit) as usize)];
    pieces.push(Piece::Renewal(pb::LeaseRenewal {}));
    if counts.len() > 1 {
        pieces.push(data(1, 0, 1, slot));
    }
    let token = pb::SampledToken { token_id: 5, index: 0, logprob: None };
    let token = (kind % 3 != 1).then_some(token);
    pieces.push(Piece::HandOver(pb::HandOver { first: token, computed_tokens: 70, counts, checksum: 0 }));
    let pieces = pieces.into_iter().map(|p| pb::PlanePiece { piece: Some(p) });
    pieces.flat_map(|p| piece(&p.encode_to_vec())).collect()
}

fn conductor_messages() -> Vec<pb::conductor_message::Message> {
    use pb::{conductor_message::Message, form_group::Meeting};
    let layout = Layout::all_in_one(1, 1, DeviceChoice::Cpu);
    let settings = worker_settings(&ConductorSettings::default(), &layout, Path::new("/model"));
    let settings_json = serde_json::to_string(&settings.unwrap_or_default()[0]).unwrap_or_default();
    let dial = pb::DialLeader { address: "127.0.0.1:9".into(), secret: vec![1; 16] };
    let group = |meeting| pb::FormGroup { rank: 1, size: 2, meeting: Some(meeting), ..Default::default() };
    vec![
        Message::Welcome(pb::Welcome { worker: 1, settings_json, host: "127.0.0.1".into() }),
        Message::FormGroup(group(Meeting::Dial(dial))),
        Message::FormGroup(group(Meeting::SharedMemory("/dev/shm/x".into()))),
    ]
}
