//! Requests whose output follows a constraint, and their correct results.

use std::sync::{Arc, LazyLock, Mutex};

use tutti_constraints::{Constraint, Environment, Progress, Token, Vocabulary};
use tutti_engine::{Engine, EngineSettings, ReadVocabulary};
use tutti_proto::{
    Rank,
    cluster::v1 as pb,
    declaration::{WalkId, WalkKind},
    v1::{self, constraint::Kind},
};

use super::{
    MIXED, launch,
    model::{InFlight, Probe, choose_allowed, hidden},
    model_ended_by,
};

/// The end token: the id behind those of the bytes.
pub const END: u32 = 256;

static ENVIRONMENT: LazyLock<Environment> =
    LazyLock::new(|| Environment::new(&bytes()).expect("it is sound"));

/// A vocabulary with a token for each byte, whose id is the byte, and an end token. The ids behind them are padding.
fn bytes() -> Vocabulary {
    let byte = |byte: u8| if byte < u8::MAX { Token::Text(vec![byte]) } else { Token::Unused };
    let tokens = (0..=u8::MAX).map(byte).chain([Token::Special("<end>".to_owned())]);
    Vocabulary::new(tokens.collect(), &[END]).expect("it is sound")
}

/// A vocabulary of the bytes of ASCII.
pub fn ascii() -> Vocabulary {
    let keep =
        |(id, token): (usize, &Token)| if !(128..=255).contains(&id) { token.clone() } else { Token::Unused };
    Vocabulary::new(bytes().tokens().iter().enumerate().map(keep).collect(), &[END]).expect("it is sound")
}

pub fn vocabulary() -> ReadVocabulary {
    Arc::new(|| Ok(bytes()))
}

/// An engine whose requests can follow constraints.
pub fn constrained_engine(settings: &EngineSettings, in_flight: InFlight) -> Engine {
    probed_constrained_engine(settings, in_flight).0
}

/// As [`constrained_engine`], with the probe of its model.
pub fn probed_constrained_engine(
    settings: &EngineSettings,
    in_flight: InFlight,
) -> (Engine, Arc<Mutex<Probe>>) {
    let prefill = WalkKind::Chunkable { batched_by: WalkId(MIXED) };
    let (model, probe) = model_ended_by(vec![END], prefill, in_flight);
    let mut engine = Engine::new(model, Rank(0), settings, 64).expect("sound settings");
    engine.set_vocabulary(vocabulary());
    (engine, probe)
}

pub fn regex(pattern: &str) -> Kind {
    Kind::Regex(pattern.to_owned())
}

pub fn schema(schema: &str) -> Kind {
    Kind::JsonSchema(v1::JsonSchema { schema: schema.to_owned(), strict: false })
}

/// A request whose output follows a constraint.
pub fn constrained(request: u64, prompt: usize, max_tokens: u32, kind: Kind) -> pb::LaunchGraph {
    let mut launch = launch(request, prompt, max_tokens);
    let constraint = v1::Constraint { kind: Some(kind), ..Default::default() };
    launch.spec.as_mut().expect("the launch has a spec").constraint = Some(constraint);
    launch
}

/// The request of this number of a mixture: constraints of several kinds, and now and then none.
pub fn any_request(request: u64) -> pb::LaunchGraph {
    let (prompt, mut max_tokens) = (1 + request as usize * 7 % 30, 3 + request as u32 * 11 % 40);
    if request % 5 == 1 {
        // An object takes more tokens than the other texts.
        max_tokens += 20;
    }
    let object = r#"{"type": "object", "properties": {"a": {"type": "string", "maxLength": 6},
        "b": {"enum": [1, true, null, "x"]}, "c": {"type": "integer"}}, "required": ["a", "b"],
        "additionalProperties": false}"#;
    let choices = ["red", "green", "blue", "reddish"].map(str::to_owned).to_vec();
    let kind = match request % 5 {
        0 => regex("[a-z]{3,9}(,[a-z]{2,9}){2,5}"),
        1 => {
            let mut launch = constrained(request, prompt, max_tokens, schema(object));
            let constraint = launch.spec.as_mut().and_then(|spec| spec.constraint.as_mut());
            constraint.expect("it is there").set_whitespace(v1::constraint::Whitespace::Compact);
            return launch;
        }
        2 => Kind::Choice(v1::Choices { texts: choices }),
        3 => Kind::Lark("start: \"<\" /[0-9]{1,20}/ \">\" start?".to_owned()),
        _ => return launch(request, prompt, max_tokens),
    };
    constrained(request, prompt, max_tokens, kind)
}

/// Correct results of a request, computed from its own tokens alone.
#[derive(Debug, PartialEq)]
pub struct Right {
    pub output: Vec<u32>,
    /// True if the output ends by itself, and not at `max_tokens`.
    pub is_complete: bool,
}

pub fn right(launch: &pb::LaunchGraph) -> Right {
    let spec = launch.spec.clone().expect("the launch has a spec");
    let (seed, max_tokens) =
        (spec.sampling.map_or(0, |s| s.seed), spec.stopping.map_or(0, |s| s.max_tokens as usize));
    let mut matcher = spec.constraint.map(|message| {
        let constraint = Constraint::from_message(message, None).expect("it is a constraint");
        ENVIRONMENT.compile(&constraint).expect("it is sound")
    });
    let mut tokens = spec.prompt.clone();
    let mut is_complete = false;
    while !is_complete && tokens.len() < spec.prompt.len() + max_tokens {
        let mut words = vec![u32::MAX; 16];
        if let Some(matcher) = &mut matcher {
            matcher.mask(&mut words).expect("a token may follow");
        }
        let allows = |token: u32| words[token as usize / 32] >> (token % 32) & 1 == 1;
        let hidden = hidden(tokens.iter().copied());
        let token = choose_allowed(hidden, seed, tokens.len() as u64, allows).expect("a token may follow");
        tokens.push(token);
        is_complete = token == END
            || matcher.as_mut().is_some_and(|matcher| {
                matcher.commit(token).expect("the mask allows it") == Progress::Finished
            });
    }
    // At `max_tokens` the engine does not ask whether the output is complete.
    is_complete &= tokens.len() < spec.prompt.len() + max_tokens || tokens.last() == Some(&END);
    Right { output: tokens.split_off(spec.prompt.len()), is_complete }
}

/// The text of an output.
pub fn text(output: &[u32]) -> String {
    let bytes = output.iter().take_while(|&&token| token != END).map(|&token| token as u8).collect();
    String::from_utf8(bytes).expect("it is text")
}
