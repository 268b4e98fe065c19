//! The declaration of all parameters, in the order of the tables in `docs/api.md`.

use crate::{
    range::{Bounded, Count, Integers, Numbers},
    sampling::{BIAS, BIASES, NUMBERS, SamplingNumber, TOP_K},
};

/// Number of choices per prompt.
pub const N: Bounded<Integers> = Bounded { name: "n", range: Integers::new(1, 128) };
/// The largest absolute value of a priority.
pub const MAX_PRIORITY: i32 = 8;
/// Priority. A lower number runs earlier, as in vLLM.
pub const PRIORITY: Bounded<Integers> =
    Bounded { name: "priority", range: Integers::new(-MAX_PRIORITY as i64, MAX_PRIORITY as i64) };
/// Maximum number of alternatives that are reported with a logprob.
pub const MAX_LOGPROBS: u32 = 20;
/// Number of alternatives that are reported with the logprob of a sampled token.
pub const LOGPROBS: Bounded<Integers> =
    Bounded { name: "logprobs", range: Integers::new(0, MAX_LOGPROBS as i64) };
/// [`LOGPROBS`] under its name in chat.
pub const TOP_LOGPROBS: Bounded<Integers> = Bounded { name: "top_logprobs", range: LOGPROBS.range };
/// Number of alternatives that are reported with the logprob of a prompt's token.
pub const PROMPT_LOGPROBS: Bounded<Integers> = Bounded { name: "prompt_logprobs", range: LOGPROBS.range };
/// Number of output tokens before which no end-of-sequence token, stop token or stop string ends the output. At most
/// `max_tokens`.
pub const MIN_TOKENS: Bounded<Integers> = Bounded { name: "min_tokens", range: Integers::UNSIGNED };
/// Maximum number of output tokens of a completion or a gRPC request that names none, as in OpenAI's API.
pub const DEFAULT_MAX_TOKENS: u32 = 16;
/// Maximum number of stop tokens of a request. The number is bounded because each sampled token is compared with every
/// stop token.
pub const STOP_TOKEN_IDS: Bounded<Count> =
    Bounded { name: "stop_token_ids", range: Count { most: 128, items: "ids" } };
/// Maximum number of stop strings of a request. The limit bounds the text that is held back from the client.
pub const STOPS: Bounded<Count> = Bounded { name: "stop", range: Count { most: 16, items: "strings" } };
/// Maximum length of a stop string. The limit bounds the text that is held back from the client.
pub const STOP_BYTES: Bounded<Count> =
    Bounded { name: STOPS.name, range: Count { most: 1024, items: "bytes in a string" } };

/// Name of the salt of cached prefixes.
pub const CACHE_SALT: &str = "cache_salt";

/// An object that has parameters: the body of an HTTP route, or an object in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The body of `/v1/completions`.
    Completions,
    /// The body of `/v1/chat/completions`.
    Chat,
    /// The body of `/tokenize`.
    Tokenize,
    /// The body of `/detokenize`.
    Detokenize,
    /// The object `stream_options`.
    StreamOptions,
    /// The object `structured_outputs`.
    StructuredOutputs,
    /// An item of the list `messages`.
    Message,
}

/// The type of a parameter's values, with their range if they have one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A boolean.
    Boolean,
    /// A number.
    Number(Numbers),
    /// An integer.
    Integer(Integers),
    /// An integer of 64 bits, with or without a sign.
    Seed,
    /// A text.
    Text,
    /// A list of texts.
    Texts,
    /// A text or a list of texts.
    Stops,
    /// A list of token ids, with the maximum length if there is one.
    TokenIds(Option<Count>),
    /// An object that maps token ids, written as texts, to numbers. The object has a maximum number of entries, and the
    /// numbers have a range.
    Biases(Count, Numbers),
    /// An object.
    Object,
    /// An object, or its JSON as a text.
    ObjectOrJson,
    /// A list of objects.
    Objects,
    /// A text, a list of token ids, a list of texts, or a list of lists of token ids.
    Prompt,
    /// A text or a list of objects.
    Content,
    /// A text or an object.
    TextOrObject,
    /// Any type, because the value is not read.
    Any,
}

/// The meaning of a parameter's absence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Absent {
    /// The parameter has no effect.
    NoEffect,
    /// The request is refused.
    Refused,
    /// The parameter is this number.
    Number(f32),
    /// The parameter is this boolean.
    Boolean(bool),
    /// The parameter has the value that this text describes.
    Means(&'static str),
}

/// Treatment of a parameter by Tutti.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The parameter does what the documentation of OpenAI or vLLM says.
    Honoured,
    /// The parameter is refused, because Tutti cannot give the answer that the parameter asks for.
    Refused {
        /// The reason.
        why: &'static str,
        /// Values, in JSON, that have no effect and pass.
        harmless: &'static [&'static str],
    },
    /// The parameter is refused, except for values that depend on other parameters. The route checks these values.
    RefusedUnless(&'static str),
    /// The parameter is accepted but not used, because the answer is correct without the parameter.
    Ignored,
}

/// A parameter, in all scopes where it has the same meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter {
    /// The parameter's name in JSON.
    pub name: &'static str,
    /// The scopes of HTTP that have the parameter. Empty if only gRPC has it.
    pub scopes: &'static [Scope],
    /// The fields of `tutti.v1.GenerateRequest` that mean the same, such as `sampling.top_p`. Empty if only HTTP has
    /// the parameter.
    pub grpc: &'static [&'static str],
    /// The type of the parameter's values.
    pub kind: Kind,
    /// The meaning of the parameter's absence.
    pub absent: Absent,
    /// True if the checkpoint's `generation_config.json` may set a default.
    pub in_checkpoint: bool,
    /// Tutti's treatment of the parameter.
    pub standing: Standing,
    /// Further advice for clients.
    pub note: &'static str,
}

/// Returns all parameters, in the order of the page.
pub fn all() -> impl Iterator<Item = &'static Parameter> {
    [FIRST, &NUMBER_ROWS, REST].into_iter().flatten()
}

/// Returns the parameters of an object.
pub fn at(scope: Scope) -> impl Iterator<Item = &'static Parameter> {
    all().filter(move |parameter| parameter.scopes.contains(&scope))
}

use Scope::{Chat, Completions, Detokenize, Message, StreamOptions, StructuredOutputs, Tokenize};

const BOTH: &[Scope] = &[Completions, Chat];

const fn parameter(name: &'static str, scopes: &'static [Scope], kind: Kind) -> Parameter {
    Parameter {
        name,
        scopes,
        grpc: &[],
        kind,
        absent: Absent::NoEffect,
        in_checkpoint: false,
        standing: Standing::Honoured,
        note: "",
    }
}

const fn flag(name: &'static str, scopes: &'static [Scope], absent: bool) -> Parameter {
    parameter(name, scopes, Kind::Boolean).absent(Absent::Boolean(absent))
}

const fn integer(bounds: &Bounded<Integers>, scopes: &'static [Scope]) -> Parameter {
    parameter(bounds.name, scopes, Kind::Integer(bounds.range))
}

const fn number(number: &SamplingNumber) -> Parameter {
    let mut declared = parameter(number.bounds.name, BOTH, Kind::Number(number.bounds.range))
        .grpc(number.grpc)
        .absent(Absent::Number(number.default))
        .note(number.note);
    declared.in_checkpoint = number.in_checkpoint;
    declared
}

const fn refused(
    name: &'static str,
    scopes: &'static [Scope],
    why: &'static str,
    harmless: &'static [&'static str],
) -> Parameter {
    parameter(name, scopes, Kind::Any).standing(Standing::Refused { why, harmless })
}

const fn ignored(name: &'static str, scopes: &'static [Scope], note: &'static str) -> Parameter {
    parameter(name, scopes, Kind::Any).standing(Standing::Ignored).note(note)
}

impl Parameter {
    const fn grpc(mut self, fields: &'static [&'static str]) -> Self {
        self.grpc = fields;
        self
    }

    const fn absent(mut self, absent: Absent) -> Self {
        self.absent = absent;
        self
    }

    const fn standing(mut self, standing: Standing) -> Self {
        self.standing = standing;
        self
    }

    const fn note(mut self, note: &'static str) -> Self {
        self.note = note;
        self
    }
}

const OLDER: &str =
    "vLLM's older name of the member of `structured_outputs`; an empty value asks for nothing";
const OUTPUTS: &[Scope] = &[StructuredOutputs];
const ONE_BACKEND: &str = "there is one backend";
const OLD_TOOLS: &str = "it is the older form of tools; use `tools`";
const BEAMS: &str = "it belongs to beam search";
/// Values by which clients ask for nothing.
const NOTHING: &[&str] = &["[]", "{}", "\"\""];
const ACCOUNTS: &str = "OpenAI's own accounting";

static FIRST: &[Parameter] = &[
    parameter("model", &[Completions, Chat, Tokenize, Detokenize], Kind::Text)
        .grpc(&["model"])
        .absent(Absent::Means("the served model"))
        .note("another name is a 404 with code `model_not_found`"),
    integer(&N, BOTH)
        .grpc(&["n"])
        .absent(Absent::Number(1.0))
        .note("choice 0 has the seed of the request, the other seeds are derived from it"),
];

/// The rows of [`NUMBERS`].
static NUMBER_ROWS: [Parameter; NUMBERS.len()] = {
    let mut rows = [number(&NUMBERS[0]); NUMBERS.len()];
    let mut i = 1;
    while i < NUMBERS.len() {
        rows[i] = number(&NUMBERS[i]);
        i += 1;
    }
    rows
};

static REST: &[Parameter] = &[
    // Parameters of completions and chat.
    Parameter { in_checkpoint: true, ..integer(&TOP_K, BOTH) }
        .grpc(&["sampling.top_k"])
        .absent(Absent::Number(0.0))
        .note("-1 and 0 keep all tokens"),
    parameter(BIASES.name, BOTH, Kind::Biases(BIASES.range, BIAS.range))
        .grpc(&["sampling.logit_bias"])
        .note("keys are token ids as strings"),
    parameter("seed", BOTH, Kind::Seed)
        .grpc(&["sampling.seed"])
        .absent(Absent::Means("drawn by the server"))
        .note("the same seed gives the same tokens, alone or among others"),
    parameter(STOPS.name, BOTH, Kind::Stops)
        .grpc(&["stopping.stop"])
        .note("cut out of the text; the tokens stay in `usage` and `token_ids`"),
    parameter(STOP_TOKEN_IDS.name, BOTH, Kind::TokenIds(Some(STOP_TOKEN_IDS.range)))
        .grpc(&["stopping.stop_token_ids"])
        .note("the token is reported without text"),
    flag("include_stop_str_in_output", BOTH, false),
    flag("ignore_eos", BOTH, false).grpc(&["stopping.ignore_eos"]),
    integer(&MIN_TOKENS, BOTH)
        .grpc(&["stopping.min_tokens"])
        .absent(Absent::Number(0.0))
        .note("at most `max_tokens`; counts against end of sequence, stop tokens and stop strings"),
    flag("skip_special_tokens", BOTH, true).grpc(&["output.keep_special_tokens"]),
    flag("return_token_ids", BOTH, false).note(
        "`token_ids` in each choice; the prompt's are in `prompt_token_ids`, in each choice, for chat once per response",
    ),
    integer(&PRIORITY, BOTH).grpc(&["priority"]).absent(Absent::Number(0.0)).note(
        "as in vLLM, a lower number runs earlier; each class has a head start of 256 steps over the next one, so high \
         numbers wait longer, but never starve",
    ),
    parameter(CACHE_SALT, BOTH, Kind::Text).grpc(&["cache_salt"]).note(
        "as in vLLM, a text that is not empty; only requests with the same API key and the same salt [share cached \
         prefixes](security.md#cached-prefixes)",
    ),
    parameter("timeout_ms", BOTH, Kind::Integer(Integers::UNSIGNED))
        .grpc(&["timeout_ms"])
        .absent(Absent::Means("no limit"))
        .note(
            "a deadline: 504 with code `deadline_exceeded` after this many milliseconds, or as soon as the first token \
             cannot come in time; a stream that has begun ends with the error as its last event",
        ),
    flag("stream", BOTH, false),
    parameter("stream_options", BOTH, Kind::Object).note("only with `stream`"),
    flag("include_usage", &[StreamOptions], false).note("the last chunk reports the usage"),
    flag("continuous_usage_stats", &[StreamOptions], false)
        .note("as in vLLM, with `include_usage`: every chunk reports the usage so far of its choice"),
    ignored("include_obfuscation", &[StreamOptions], "asks for padding, which is optional"),
    ignored("user", BOTH, ACCOUNTS),
    ignored("metadata", BOTH, ACCOUNTS),
    ignored("store", BOTH, ACCOUNTS),
    ignored("service_tier", BOTH, ACCOUNTS),
    ignored("safety_identifier", BOTH, ACCOUNTS),
    ignored("prompt_cache_key", BOTH, ACCOUNTS),
    // Constraints. A request has one of them.
    parameter("response_format", BOTH, Kind::Object).absent(Absent::Means("any text")).note(
        "`text`, `json_object`, `json_schema` or vLLM's `structural_tag`, see [structured output](structured-output.md)",
    ),
    parameter("structured_outputs", BOTH, Kind::Object)
        .absent(Absent::Means("any text"))
        .note("as in vLLM: one of the first six members"),
    parameter("json", OUTPUTS, Kind::ObjectOrJson).note("a JSON schema, not checked for OpenAI's strict rules"),
    parameter("regex", OUTPUTS, Kind::Text).note("matches the whole answer"),
    parameter("choice", OUTPUTS, Kind::Texts).note("the answer is one of them"),
    parameter("grammar", OUTPUTS, Kind::Text).note("in Lark"),
    flag("json_object", OUTPUTS, false),
    parameter("structural_tag", OUTPUTS, Kind::ObjectOrJson).note("`structures` and `triggers`"),
    parameter("whitespace", OUTPUTS, Kind::Text)
        .absent(Absent::Means("`bounded`"))
        .note("`compact`, `bounded` or `any`: white space between the tokens of JSON; for `response_format`, too"),
    flag("disable_any_whitespace", OUTPUTS, false).note("the same as `compact`"),
    parameter("whitespace_pattern", OUTPUTS, Kind::Text).note("an empty text is `compact`, and `\\s*` is `any`; no others"),
    refused(
        "disable_additional_properties",
        OUTPUTS,
        "schemas are taken as they are; write additionalProperties",
        &["false"],
    ),
    ignored("disable_fallback", OUTPUTS, ONE_BACKEND),
    parameter("guided_json", BOTH, Kind::ObjectOrJson).note(OLDER),
    parameter("guided_regex", BOTH, Kind::Text).note(OLDER),
    parameter("guided_choice", BOTH, Kind::Texts).note(OLDER),
    parameter("guided_grammar", BOTH, Kind::Text).note(OLDER),
    parameter("structural_tag", BOTH, Kind::ObjectOrJson).note(OLDER),
    parameter("guided_whitespace_pattern", BOTH, Kind::Text)
        .note("vLLM's older name of `structured_outputs.whitespace_pattern`"),
    ignored("guided_decoding_backend", BOTH, ONE_BACKEND),
    refused("logits_processors", BOTH, "requests bring no code; use logit_bias", &["[]"]),
    refused("bad_words", BOTH, "use logit_bias", &["[]"]),
    refused("allowed_token_ids", BOTH, "use logit_bias", &["[]"]),
    refused("length_penalty", BOTH, BEAMS, &["1", "1.0"]),
    refused("early_stopping", BOTH, BEAMS, &["false"]),
    refused("spaces_between_special_tokens", BOTH, "the tokenizer's own decoder decides", &["true"]),
    refused(
        "use_beam_search",
        BOTH,
        "tokens are sampled one by one; use n for several choices",
        &["false"],
    ),
    // Parameters of completions alone.
    parameter("prompt", &[Completions], Kind::Prompt)
        .grpc(&["text", "token_ids"])
        .absent(Absent::Refused)
        .note("`n` choices for each"),
    flag("add_special_tokens", &[Completions], true).note("tokens that the tokenizer puts around a text"),
    parameter("max_tokens", &[Completions], Kind::Integer(Integers::UNSIGNED))
        .grpc(&["stopping.max_tokens"])
        .absent(Absent::Number(DEFAULT_MAX_TOKENS as f32))
        .note("0 is legal with `echo` or `prompt_logprobs`: the prompt is scored and nothing generated"),
    flag("echo", &[Completions], false).grpc(&["output.echo"]).note(
        "the prompt's text comes first; with `logprobs` so do the logprobs of its tokens, except the first",
    ),
    integer(&LOGPROBS, &[Completions])
        .grpc(&["output.logprobs"])
        .note("OpenAI's lists; the sampled token is always among `top_logprobs`"),
    integer(&PROMPT_LOGPROBS, &[Completions]).grpc(&["output.prompt_logprobs"]).note(
        "as in vLLM: null for the first token, then an object by token id; computed once per prompt and reported by each \
         choice",
    ),
    parameter("best_of", &[Completions], Kind::Integer(Integers::UNSIGNED))
        .standing(Standing::RefusedUnless("equal to `n`"))
        .note("all choices are returned, none is picked"),
    refused("suffix", &[Completions], "the model continues prompts and does not fill gaps", &["\"\""]),
    // Parameters of chat alone.
    parameter("messages", &[Chat], Kind::Objects)
        .grpc(&["chat"])
        .absent(Absent::Refused)
        .note("special tokens in them are [text](security.md#text-and-control-tokens)"),
    parameter("role", &[Message], Kind::Text).absent(Absent::Refused),
    parameter("content", &[Message], Kind::Content).absent(Absent::Refused).note(
        "parts are `text`, which become lines unless the template reads parts, and [media](media.md) where the model takes \
         them: `image_url`, `input_audio`, `audio_url`, `video_url`; an assistant's may be null",
    ),
    parameter("name", &[Message], Kind::Text),
    parameter("tool_calls", &[Message], Kind::Objects).note(
        "an assistant's; `arguments` are an object or its JSON, and the template gets an object; empty ones are `{}`, and \
         text that is no JSON, as a call that was cut has it, becomes the member `arguments`",
    ),
    parameter("tool_call_id", &[Message], Kind::Text)
        .note("a tool's; the id of a call in an earlier message, in any form"),
    parameter("reasoning_content", &[Message], Kind::Text)
        .note("an assistant's; the template decides what it shows of earlier reasoning"),
    parameter("reasoning", &[Message], Kind::Text).note("another name of `reasoning_content`"),
    refused("function_call", &[Message], OLD_TOOLS, NOTHING),
    refused(
        "audio",
        &[Message],
        "the server keeps no answers; send the audio itself, as input_audio",
        &[],
    ),
    ignored("refusal", &[Message], "of OpenAI's answers, which clients send back as messages"),
    ignored("annotations", &[Message], "of OpenAI's answers, which clients send back as messages"),
    parameter("max_completion_tokens", &[Chat], Kind::Integer(Integers::UNSIGNED))
        .absent(Absent::Means("the rest of the context")),
    parameter("max_tokens", &[Chat], Kind::Integer(Integers::UNSIGNED))
        .absent(Absent::Means("the rest of the context"))
        .note("the older name of `max_completion_tokens`; both are refused if they differ"),
    flag("logprobs", &[Chat], false),
    integer(&TOP_LOGPROBS, &[Chat]).absent(Absent::Number(0.0)).note("only with `logprobs`"),
    parameter("chat_template_kwargs", &[Chat], Kind::Object)
        .note(
            "further variables of the checkpoint's template, up to 64 KiB; none may have the name of a special token, \
             such as `bos_token`, or of a variable that the request's own parameters set, such as `messages`",
        ),
    flag("add_generation_prompt", &[Chat], true)
        .absent(Absent::Means("true, unless `continue_final_message` is set")),
    flag("continue_final_message", &[Chat], false).note("continue the last message instead of answering it"),
    flag("add_special_tokens", &[Chat], false)
        .note("tokens that the tokenizer puts around a text; templates write them"),
    refused("chat_template", &[Chat], "the checkpoint's own template is used", &[]),
    parameter("tools", &[Chat], Kind::Objects)
        .note("up to 128 [functions](tools.md); refused if the model's format of calls is not known"),
    parameter("tool_choice", &[Chat], Kind::TextOrObject).absent(Absent::Means("`auto`")).note(
        "`none`, `auto`, `required` or a function; the last two are [enforced](tools.md#are-calls-enforced)",
    ),
    flag("parallel_tool_calls", &[Chat], true).note("false: an answer ends with its first call"),
    refused("functions", &[Chat], OLD_TOOLS, NOTHING),
    refused("documents", &[Chat], "templates get no documents; put them into messages", NOTHING),
    refused("echo", &[Chat], "a chat's prompt is the template's text; use /v1/completions", &["false"]),
    refused("best_of", &[Chat], "all choices are returned, none is picked", &["1"]),
    refused("suffix", &[Chat], "the model continues prompts and does not fill gaps", &["\"\""]),
    parameter("mm_processor_kwargs", &[Chat], Kind::Object).note(
        "`{\"use_audio_in_video\": true}`: [sound within videos](media.md#a-video-with-its-sound); other members are \
         refused",
    ),
    refused("function_call", &[Chat], OLD_TOOLS, &["\"none\"", "\"auto\""]),
    refused("modalities", &[Chat], "the output is text", &["[\"text\"]", "[]"]),
    refused("audio", &[Chat], "the output is text", &[]),
    parameter("enable_thinking", &[Chat], Kind::Boolean)
        .absent(Absent::Means("the template's default"))
        .note("turns [reasoning](tools.md#how-is-reasoning-turned-on-and-off) on or off, if the template can"),
    parameter("thinking", &[Chat], Kind::Boolean)
        .absent(Absent::Means("the template's default"))
        .note("another name of `enable_thinking`; also `{\"type\": \"enabled\"}` or `\"disabled\"`"),
    parameter("reasoning_effort", &[Chat], Kind::Text)
        .absent(Absent::Means("the template's default"))
        .note("for templates that know it; `none` turns reasoning off in others"),
    flag("include_reasoning", &[Chat], true).note("false leaves reasoning out of the answer"),
    parameter("thinking_token_budget", &[Chat], Kind::Integer(Integers::UNSIGNED))
        .absent(Absent::Means("no limit"))
        .note("tokens inside the block of reasoning; after them, nothing but its end is sampled"),
    refused("verbosity", &[Chat], "the model has no such setting", &["\"medium\""]),
    refused("web_search_options", &[Chat], "the server reaches no other", &[]),
    refused("prompt_logprobs", &[Chat], "the prompt is the template's text; use /v1/completions", &[]),
    ignored("prediction", &[Chat], "a hint for speed"),
    // Parameters of `/tokenize` and `/detokenize`.
    parameter("prompt", &[Tokenize], Kind::Text).note("one of `prompt` and `messages` is required"),
    parameter("messages", &[Tokenize], Kind::Objects).note("text only"),
    parameter("tools", &[Tokenize], Kind::Objects).note("only with `messages`"),
    flag("return_token_strs", &[Tokenize], false),
    flag("add_special_tokens", &[Tokenize], true)
        .absent(Absent::Means("true for `prompt`, false for `messages`")),
    parameter("chat_template_kwargs", &[Tokenize], Kind::Object).note("this and the next three only with `messages`"),
    flag("add_generation_prompt", &[Tokenize], true)
        .absent(Absent::Means("true, unless `continue_final_message` is set")),
    flag("continue_final_message", &[Tokenize], false),
    refused("chat_template", &[Tokenize], "the checkpoint's own template is used", &[]),
    parameter("tokens", &[Detokenize], Kind::TokenIds(None))
        .absent(Absent::Refused)
        .note("as many as the model's context"),
    // Parameters of gRPC alone.
    parameter("media", &[], Kind::Objects).grpc(&["media"]),
    parameter("constraint", &[], Kind::Object).grpc(&["constraint"]),
];

#[cfg(test)]
mod tests;
