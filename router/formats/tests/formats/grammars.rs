//! Grammars of calls: what a format writes is allowed, what a grammar allows is read, and nothing else is allowed.

use serde_json::{Map, Value, json};
use tutti_constraints::{Constraint, Environment, Kind, Matcher, Progress, Token};
use tutti_formats::{Answer, Block, CallLimit, Format, Request, ToolGrammar, Tools, Vocabulary, Wanted};

use crate::{
    samples::SAMPLES,
    support::{calls, dialect, tools_of},
};

/// The first id of the markers of a format, behind the tokens of bytes.
const FIRST_MARKER: u32 = 256;

/// Bytes and markers, prepared for masks.
pub struct Tested {
    markers: Vec<&'static str>,
    environment: Environment,
}

impl Tested {
    pub fn new(markers: &[&'static str]) -> Self {
        Self::with(markers, |text| Token::Special(text.to_owned()))
    }

    fn with(markers: &[&'static str], token: fn(&str) -> Token) -> Self {
        let bytes = (0..=255).map(|byte| if byte == 255 { Token::Unused } else { Token::Text(vec![byte]) });
        let special = markers.iter().map(|text| token(text));
        let end = FIRST_MARKER + markers.len() as u32;
        let tokens = bytes.chain(special).chain([Token::Special("<end>".into())]).collect();
        let vocabulary = tutti_constraints::Vocabulary::new(tokens, &[end]).unwrap();
        Self { markers: markers.to_vec(), environment: Environment::new(&vocabulary).unwrap() }
    }

    fn end(&self) -> u32 {
        FIRST_MARKER + self.markers.len() as u32
    }

    fn vocabulary(&self) -> Vocabulary {
        self.markers.iter().map(|text| (*text).to_owned()).zip(FIRST_MARKER..).collect()
    }

    fn grammar(&self, format: &str, wanted: Wanted, limit: CallLimit) -> Option<String> {
        let (weather, search) = (schema(), Map::new());
        let tools = [
            ToolGrammar::with_schema("weather", &weather),
            ToolGrammar::without_arguments("now"),
            ToolGrammar::with_schema("search", &search),
        ];
        Format::choose(format, None).unwrap().grammar(&tools, wanted, limit, &self.vocabulary()).unwrap()
    }

    /// The grammar of calls of these tools.
    pub fn grammar_of(&self, format: &str, tools: &[ToolGrammar<'_>]) -> String {
        let format = Format::choose(format, None).unwrap();
        format.grammar(tools, Wanted::Calls, CallLimit::None, &self.vocabulary()).unwrap().unwrap()
    }

    /// Checks a grammar as a server does before it accepts a request.
    pub fn check(&self, grammar: &str) {
        let constraint = Constraint::new(Kind::Lark(grammar.to_owned()));
        let checked = self.environment.check(&constraint, std::time::Duration::from_secs(60));
        checked.unwrap_or_else(|error| panic!("{error:?}: {grammar}"));
    }

    fn matcher(&self, grammar: &str) -> Matcher {
        let constraint = Constraint::new(Kind::Lark(grammar.to_owned()));
        self.environment.compile(&constraint).unwrap_or_else(|error| panic!("{error:?}: {grammar}"))
    }

    /// The tokens of a text.
    fn tokens(&self, text: &str) -> Vec<u32> {
        let (mut tokens, mut rest) = (Vec::new(), text);
        while let Some(first) = rest.chars().next() {
            let marker =
                self.markers.iter().zip(FIRST_MARKER..).find(|(marker, _)| rest.starts_with(**marker));
            let length = match marker {
                Some((marker, id)) => {
                    tokens.push(id);
                    marker.len()
                }
                None => {
                    tokens.extend(first.to_string().bytes().map(u32::from));
                    first.len_utf8()
                }
            };
            rest = &rest[length..];
        }
        tokens
    }

    /// True if a grammar admits a text and may end behind it.
    fn admits(&self, grammar: &str, text: &str) -> bool {
        let mut matcher = self.matcher(grammar);
        let mut words = vec![0; matcher.mask_words()];
        for token in self.tokens(text) {
            if matcher.is_finished() || matcher.mask(&mut words).is_err() || !is_set(&words, token) {
                return false;
            }
            matcher.commit(token).unwrap();
        }
        matcher.is_accepting().unwrap()
    }

    /// An output that a grammar allows, at random. `None` if it does not end soon.
    pub fn walk(&self, grammar: &str, random: &mut fastrand::Rng) -> Option<Vec<u32>> {
        let mut matcher = self.matcher(grammar);
        let mut words = vec![0; matcher.mask_words()];
        let mut tokens = Vec::new();
        while tokens.len() < 600 {
            matcher.mask(&mut words).unwrap();
            let allowed: Vec<u32> = (0..=self.end()).filter(|&token| is_set(&words, token)).collect();
            // Letters, closing quotes and markers, so that texts end.
            let likely: Vec<u32> = allowed
                .iter()
                .copied()
                .filter(|token| {
                    matches!(token, 0x22 | 0x5d | 0x7d | 0x2c | 0x3c | 0x0a | 0x61..=0x63)
                        || *token >= FIRST_MARKER
                })
                .collect();
            let choice = if likely.is_empty() || random.u8(..) < 20 { &allowed } else { &likely };
            let token = choice[random.usize(..choice.len())];
            if token == self.end() {
                return Some(tokens);
            }
            tokens.push(token);
            if matcher.commit(token).unwrap() == Progress::Finished {
                return Some(tokens);
            }
        }
        None
    }

    /// The answer that a format reads in tokens.
    fn read(&self, format: &str, reasoning: &str, tokens: &[u32]) -> Answer {
        self.read_with(
            format,
            reasoning,
            tools_of([("weather", Value::Object(schema())), ("now", json!({}))]),
            tokens,
        )
    }

    /// As `read`, with these tools.
    pub fn read_with(&self, format: &str, reasoning: &str, tools: Tools, tokens: &[u32]) -> Answer {
        let mut dialect = dialect(format, reasoning, &[]);
        dialect.vocabulary = self.vocabulary();
        let request = Request { tools: tools.into(), block: Block::Closed, ..Request::default() };
        let mut parser = dialect.parser(request);
        let mut answer = Answer::default();
        let mut held = Vec::new();
        for &token in tokens {
            let text = if token >= FIRST_MARKER {
                self.markers[(token - FIRST_MARKER) as usize].to_owned()
            } else {
                held.push(token as u8);
                let Ok(text) = String::from_utf8(held.clone()) else { continue };
                held.clear();
                text
            };
            answer.extend(parser.push(token, &text));
        }
        answer.extend(parser.finish(""));
        answer
    }
}

fn is_set(words: &[u32], token: u32) -> bool {
    words[token as usize / 32] >> (token % 32) & 1 == 1
}

/// The parameters of the tool `weather`, in the order of the samples.
fn schema() -> Map<String, Value> {
    let schema = json!({
        "type": "object",
        "$defs": {"count": {"type": "integer"}},
        "properties": {
            "city": {"type": "string", "description": "a name: with | signs"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "count": {"$ref": "#/$defs/count"},
            "options": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false},
        },
        "required": ["city"],
        "additionalProperties": false,
    });
    schema.as_object().unwrap().clone()
}

/// Calls as each family writes them: of `weather` with two parameters, and of `now`.
const WRITTEN: &[(&str, &[&str])] = &[
    (
        "hermes",
        &[
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}}\n</tool_call>",
            "\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        ],
    ),
    (
        "qwen_xml",
        &[
            "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
            "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ],
    ),
    (
        "llama3_json",
        &[
            "{\"name\": \"weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": 2}}",
            "; {\"name\": \"now\", \"parameters\": {}}",
        ],
    ),
    ("pythonic", &["[weather(city=\"Zürich\", days=2)", ", now()"]),
    (
        "deepseek",
        &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Zürich\", \"days\": 2}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ],
    ),
    (
        "deepseek",
        &[
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"Zürich\", \"days\": 2}\n```<｜tool▁call▁end｜>",
            "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        ],
    ),
    (
        "dsml",
        &[
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>",
            "\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>",
        ],
    ),
    (
        "glm",
        &[
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            "\n<tool_call>now\n</tool_call>",
        ],
    ),
    (
        "glm",
        &[
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>",
            "<tool_call>now</tool_call>",
        ],
    ),
    (
        "kimi",
        &[
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{\"city\": \"Zürich\", \"days\": 2}<|tool_call_end|>",
            "<|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ],
    ),
    (
        "minimax",
        &[
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Zürich</parameter>\n<parameter name=\"days\">2</parameter>\n</invoke>",
            "\n<invoke name=\"now\">\n</invoke>",
        ],
    ),
];

/// Text that closes a block of calls.
fn block_end(format: &str) -> &'static str {
    match format {
        "pythonic" => "]",
        "deepseek" => "<｜tool▁calls▁end｜>",
        "dsml" => "\n</｜DSML｜function_calls>",
        "kimi" => "<|tool_calls_section_end|>",
        "minimax" => "\n</minimax:tool_call>",
        _ => "",
    }
}

fn mistral() -> [(&'static [&'static str], [&'static str; 2], &'static str); 3] {
    [
        (
            &["[TOOL_CALLS]"],
            [
                "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": 2}}",
                ", {\"name\": \"now\", \"arguments\": {}}",
            ],
            "]",
        ),
        (
            &["[TOOL_CALLS]", "[ARGS]"],
            ["[TOOL_CALLS]weather[ARGS]{\"city\": \"Zürich\", \"days\": 2}", "[TOOL_CALLS]now[ARGS]{}"],
            "",
        ),
        (
            &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            [
                "[TOOL_CALLS]weather[CALL_ID]AbC123xyZ[ARGS]{\"city\": \"Zürich\", \"days\": 2}",
                "[TOOL_CALLS]now[ARGS]{}",
            ],
            "",
        ),
    ]
}

/// Checks that a grammar admits the calls, alone and together, and that their reader finds them.
fn admits_calls(format: &str, markers: &[&'static str], calls_written: [&str; 2], end: &str) {
    let tested = Tested::new(markers);
    let [first, second] = calls_written;
    let (one, two) = (format!("{first}{end}"), format!("{first}{second}{end}"));
    for (limit, admits_two) in [(CallLimit::None, true), (CallLimit::One, false)] {
        let grammar = tested.grammar(format, Wanted::Calls, limit).unwrap();
        tested.check(&grammar);
        assert!(tested.admits(&grammar, &one), "{one}\n{grammar}");
        assert_eq!(tested.admits(&grammar, &two), admits_two, "{two}\n{grammar}");
        for other in [
            "",
            "Hello",
            &one.replace("weather", "fly"),
            &one.replace("Zürich", "\u{0}").replace('2', "\"two\""),
        ] {
            assert!(!tested.admits(&grammar, other), "{other}\n{grammar}");
        }
    }
    let answer = tested.read(format, "none", &tested.tokens(&two));
    assert_eq!(calls(&answer), [("weather", "{\"city\": \"Zürich\", \"days\": 2}"), ("now", "{}")], "{two}");
    if let Some(grammar) = tested.grammar(format, Wanted::TextAndCalls, CallLimit::None) {
        for text in ["", "Hello", &format!("I look.\n{two}"), &one] {
            assert!(tested.admits(&grammar, text), "{text}\n{grammar}");
        }
        let bad = one.replace("days", "nights");
        assert!(!tested.admits(&grammar, &bad), "{bad}\n{grammar}");
    }
}

#[test]
fn arguments_that_a_schema_does_not_name_are_free() {
    let open = json!({ "type": "object" });
    let referred = json!({ "$ref": "#/$defs/a", "$defs": { "a": { "type": "object" } } });
    let closed = json!({ "type": "object", "additionalProperties": false });
    for (format, written) in WRITTEN {
        let sample = SAMPLES.iter().find(|sample| sample.format == *format).unwrap();
        let tested = Tested::new(sample.markers);
        // A parameter that no schema declares is text in DSML.
        let call =
            format!("{}{}", written[0], block_end(format)).replace("string=\"false\"", "string=\"true\"");
        for (schema, is_free) in [(&open, true), (&referred, true), (&closed, false)] {
            let tools = [ToolGrammar::with_schema("weather", schema.as_object().unwrap())];
            let grammar = tested.grammar_of(format, &tools);
            tested.check(&grammar);
            assert_eq!(tested.admits(&grammar, &call), is_free, "{call}\n{grammar}");
        }
    }
}

#[test]
fn each_format_s_grammar_admits_its_calls() {
    for (format, written) in WRITTEN {
        let sample = SAMPLES.iter().find(|sample| sample.format == *format).unwrap();
        let first = sample.markers.first().copied().unwrap_or_default();
        assert!(!first.is_empty());
        for markers in [sample.markers, &[]] {
            admits_calls(format, markers, [written[0], written[1]], block_end(format));
        }
    }
    for (markers, written, end) in mistral() {
        admits_calls("mistral", markers, written, end);
    }
}

#[test]
fn harmony_reasons_and_then_calls() {
    let sample = SAMPLES.iter().find(|sample| sample.format == "harmony").unwrap();
    let tested = Tested::new(sample.markers);
    let grammar = tested.grammar("harmony", Wanted::Calls, CallLimit::None).unwrap();
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Bern\"}";
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    assert!(
        tested.admits(&grammar, call) && tested.admits(&grammar, &format!("{thought}{call}")),
        "{grammar}"
    );
    assert!(!tested.admits(&grammar, "<|channel|>final<|message|>Hi") && !tested.admits(&grammar, thought));
}

#[test]
fn what_a_grammar_generates_is_read_as_calls() {
    let mut random = fastrand::Rng::with_seed(39);
    let mut formats: Vec<(&str, &[&'static str])> =
        SAMPLES.iter().map(|sample| (sample.format, sample.markers)).collect();
    formats.dedup();
    for (format, markers) in formats {
        let tested = Tested::new(markers);
        let grammar = tested.grammar(format, Wanted::Calls, CallLimit::None).unwrap();
        let mut ended = 0;
        for _ in 0..30 {
            let Some(tokens) = tested.walk(&grammar, &mut random) else { continue };
            ended += 1;
            let answer = tested.read(format, "none", &tokens);
            let context = || format!("{format}: {:?}", tested_text(&tested, &tokens));
            assert!(!answer.calls.is_empty(), "{}", context());
            assert_eq!(answer.content, "", "{}", context());
            for call in &answer.calls {
                assert!(["weather", "now", "search"].contains(&call.name.as_str()), "{}", context());
                let arguments: Value = serde_json::from_str(&call.arguments)
                    .unwrap_or_else(|error| panic!("{error}: {} in {}", call.arguments, context()));
                if call.name == "weather" {
                    assert!(arguments["city"].is_string(), "{}", context());
                    assert!(arguments.get("days").is_none_or(Value::is_number), "{}", context());
                }
            }
        }
        assert!(ended >= 5, "{format}: {ended} of 30 walks ended");
    }
}

pub fn tested_text(tested: &Tested, tokens: &[u32]) -> String {
    let mut bytes = Vec::new();
    for &token in tokens {
        match token.checked_sub(FIRST_MARKER) {
            Some(marker) => bytes.extend_from_slice(tested.markers[marker as usize].as_bytes()),
            None => bytes.push(token as u8),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Tokenizers do not call all markers special. A worker's vocabulary then has them as text.
#[test]
fn required_calls_need_no_special_tokens() {
    let markers = ["<tool_call>", "</tool_call>"];
    let tested = Tested::with(&markers, |text| Token::Text(text.as_bytes().to_vec()));
    let grammar = tested.grammar("hermes", Wanted::Calls, CallLimit::None).unwrap();
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"a\"}}\n</tool_call>";
    assert!(
        tested.admits(&grammar, call) && tested.admits(&grammar, &format!("{call}\n{call}")),
        "{grammar}"
    );
    assert!(!tested.admits(&grammar, &call.replace("city", "town")) && !tested.admits(&grammar, "Hello"));
}
