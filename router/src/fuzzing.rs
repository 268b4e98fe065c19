//! Entry points of the fuzzers (`tests/fuzzing`). A failed assertion is a finding.

mod constraint;
mod template;
mod text;

use std::sync::{Arc, LazyLock};

use tutti_proto::{
    cluster::v1::{self as pb, MediaKind},
    declaration::{MediaForm, MediaInput, ModelDeclaration, NodeId, Walk, WalkId, WalkKind},
    parameters::SamplingParams,
    v1::{self, Sampling},
};
use tutti_runtime::{Error, ErrorKind};

use crate::{
    generation,
    http::fuzzing::Route,
    served::{ServedModel, ServedText, TextFiles, TextSettings},
    test_support,
    text::{
        dialect::{ModelDialect, ParserNames},
        template::ChatTemplate,
    },
};

pub use self::{
    constraint::constraint,
    template::chat_template,
    text::{Outputs, stop_strings},
};

/// Maximum number of tokens per request of the served model.
const CONTEXT: u32 = 256;
/// Maximum number of choices per request.
const MAX_CHOICES: u32 = 64;
/// Maximum number of logprobs of prompts per request.
const MAX_PROMPT_LOGPROBS: usize = 100_000;
/// Maximum length in bytes of an error's text: the name of the field, and the shortened message.
const MAX_ERROR_BYTES: usize = 3072;

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}\
    {% endif %}<|role|>{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}{% if enable_thinking %}<t>{% endif %}\
    {% if add_generation_prompt %}<|role|>assistant:{% endif %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
    {# <tool_call> arguments </think> #}";

/// The description of a model that takes text and audio.
pub fn model() -> pb::ModelDescription {
    let batched_by = WalkId(2);
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    let walks = vec![
        walk("prefill", WalkKind::Chunkable { batched_by }),
        walk("decode", WalkKind::Decode { batched_by }),
        walk("step", WalkKind::Mixed),
        walk("encode", WalkKind::Atomic { batched_by: WalkId(4) }),
        walk("encoders", WalkKind::Mixed),
    ];
    let audio = MediaInput {
        kind: MediaKind::Audio,
        walk: WalkId(3),
        placeholder: 263,
        form: MediaForm::Bytes { per_token: 4 },
        width: 4,
        formats: vec!["wav".into(), "mp3".into()],
        encoded_together: true,
        max_call_tokens: Some(64),
    };
    let declaration =
        ModelDeclaration::new(vec!["thinker".into()], walks, vec![]).expect("a sound declaration");
    let declaration = declaration.with_media(vec![audio]).expect("a sound declaration");
    pb::ModelDescription {
        served_name: "tiny".into(),
        vocab_size: test_support::VOCAB,
        max_context_tokens: CONTEXT,
        max_request_tokens: CONTEXT,
        eos_token_ids: vec![261],
        has_tokenizer: true,
        declaration: Some((&declaration).into()),
        ..Default::default()
    }
}

fn served() -> &'static ServedModel {
    static SERVED: LazyLock<ServedModel> = LazyLock::new(|| {
        let config = br#"{"eos_token": "<|end|>"}"#;
        let template = ChatTemplate::read(Some(config), Some(TEMPLATE.as_bytes())).expect("a template");
        let tokenizer = test_support::tokenizer();
        let dialect = ModelDialect::choose(&ParserNames::default(), template.as_ref(), &tokenizer);
        let text = ServedText {
            tokenizer: Some(tokenizer),
            template: template.map(|template| Ok(Arc::new(template))),
            defaults: Sampling::default(),
            dialect: dialect.expect("the names are known"),
        };
        ServedModel { description: model(), text: Arc::new(text) }
    });
    &SERVED
}

/// Parses a body for the route that `route` selects, and returns the resulting requests to the conductor. Asserts that
/// white space around the body changes nothing.
pub fn http_body(route: u8, body: &[u8]) -> Vec<pb::RequestSpec> {
    let route = [Route::Completions, Route::Chat, Route::Tokenize, Route::Detokenize][usize::from(route % 4)];
    let parsed = route.parse(body, MAX_CHOICES as usize, served());
    let padded = [b" \r\n\t", body, b"\n "].concat();
    match (&parsed, &route.parse(&padded, MAX_CHOICES as usize, served())) {
        (Ok(parsed), Ok(padded)) => assert_eq!(parsed, padded, "white space changes a request"),
        (Err(_), Err(_)) => {}
        (parsed, padded) => panic!("white space changes an outcome: {parsed:?}, {padded:?}"),
    }
    let specs = parsed.and_then(|request| match request {
        Some(request) => generation::fuzzing::specs(request, served(), MAX_CHOICES, MAX_PROMPT_LOGPROBS),
        None => Ok(Vec::new()),
    });
    specs.inspect_err(check_refusal).unwrap_or_default()
}

/// Converts a message of `tutti.v1.Inference/Generate` into requests to the conductor. `timeout` is the value of the
/// call's `grpc-timeout` header.
pub fn grpc_message(message: v1::GenerateRequest, timeout: &[u8]) -> Vec<pb::RequestSpec> {
    let (request, kind) = match crate::grpc::fuzzing::read(message, timeout) {
        Ok(read) => read,
        Err(error) => {
            check_refusal(&error);
            return Vec::new();
        }
    };
    match generation::fuzzing::specs(request, served(), MAX_CHOICES, MAX_PROMPT_LOGPROBS) {
        Ok(specs) => specs,
        Err(error) => {
            let error = crate::grpc::fuzzing::respell(error, kind);
            check_refusal(&error);
            // The error must reach the client unchanged.
            let seen = Error::from(tonic::Status::from(error.clone()));
            assert_eq!((seen.kind(), seen.message()), (error.kind(), error.message()));
            assert_eq!(seen.field(), error.field(), "the field is lost on the way");
            Vec::new()
        }
    }
}

/// Asserts that a refusal blames the caller, and that its text is short.
fn check_refusal(error: &Error) {
    let known = [ErrorKind::InvalidArgument, ErrorKind::NotFound, ErrorKind::DeadlineExceeded];
    assert!(known.contains(&error.kind()), "a request is refused as {:?}: {error}", error.kind());
    assert!(error.to_string().len() <= MAX_ERROR_BYTES, "an error of {} bytes", error.to_string().len());
    assert!(!error.message().is_empty(), "an error without a reason");
}

/// Reads the data as a file of API keys, as a `generation_config.json` and as a `tokenizer_config.json`.
pub fn files(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        crate::keys::read_lines(text);
    }
    let files = TextFiles { generation_config: Some(data.to_vec()), ..TextFiles::default() };
    if let Ok(text) =
        ServedText::read(&files, &TextSettings { skip_tokenizer_init: true, ..TextSettings::default() })
    {
        // Accepted defaults must be valid for a request without parameters.
        let params = SamplingParams::complete(&Sampling::default(), &text.defaults, || 0);
        assert!(params.check(0).is_ok());
    }
    let tokenizer_config = TextFiles {
        tokenizer: Some(test_support::tokenizer_json()),
        tokenizer_config: Some(data.to_vec()),
        ..TextFiles::default()
    };
    let _ = ServedText::read(&tokenizer_config, &TextSettings::default());
}
