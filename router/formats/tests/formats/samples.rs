//! Two calls with content around them, as each family writes them.

use crate::support::{answer, calls, dialect, request, tokens};

/// An output of a family, and what is in it.
pub struct Sample {
    pub format: &'static str,
    pub reasoning: &'static str,
    pub output: &'static str,
    /// The markers that are tokens in tokenizers of the family.
    pub markers: &'static [&'static str],
    pub thought: &'static str,
    pub content: &'static str,
    pub calls: &'static [(&'static str, &'static str)],
}

const THINK: &[&str] = &["<think>", "</think>", "<tool_call>", "</tool_call>"];

pub const SAMPLES: &[Sample] = &[
    Sample {
        format: "hermes",
        reasoning: "think",
        output: "<think>\nTwo calls, 1 < 2.\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich \\\"}</tool_call>\", \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"arguments\": {}, \"name\": \"now\"}\n</tool_call>\n",
        markers: THINK,
        thought: "Two calls, 1 < 2.",
        content: "I look.\n",
        calls: &[("weather", "{\"city\": \"Zürich \\\"}</tool_call>\", \"days\": 2}"), ("now", "{}")],
    },
    Sample {
        format: "qwen_xml",
        reasoning: "think",
        output: "<think>\nHm.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n\"</parameter>\" </tool_call>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        markers: THINK,
        thought: "Hm.",
        content: "",
        calls: &[
            (
                "weather",
                "{\"city\": \"Bern\\n\\\"</parameter>\\\" </tool_call>\\n\", \"days\": 3, \"exact\": true}",
            ),
            ("now", "{}"),
        ],
    },
    Sample {
        format: "llama3_json",
        reasoning: "none",
        output: "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Bern; {\", \"days\": 1}}; {\"type\": \"function\", \"name\": \"now\", \"parameters\": {}}",
        markers: &["<|python_tag|>"],
        thought: "",
        content: "",
        calls: &[("weather", "{\"city\": \"Bern; {\", \"days\": 1}"), ("now", "{}")],
    },
    Sample {
        format: "pythonic",
        reasoning: "none",
        output: "[weather(city='O\\'Hare [1]', days=2, list=[1, (2, None), {'a': True},], share=1.5), now()]",
        markers: &["<|python_start|>", "<|python_end|>"],
        thought: "",
        content: "",
        calls: &[
            (
                "weather",
                "{\"city\": \"O'Hare [1]\", \"days\": 2, \"list\": [1, [2, null], {\"a\": true}], \"share\": 1.5}",
            ),
            ("now", "{}"),
        ],
    },
    Sample {
        format: "mistral",
        reasoning: "none",
        output: "I look. [TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"[Bern]\"}}, {\"name\": \"now\", \"arguments\": {}, \"id\": \"abcdefghi\"}]",
        markers: &["[TOOL_CALLS]"],
        thought: "",
        content: "I look. ",
        calls: &[("weather", "{\"city\": \"[Bern]\"}"), ("now", "{}")],
    },
    Sample {
        format: "mistral",
        reasoning: "mistral",
        output: "[THINK]Hm.[/THINK][TOOL_CALLS]weather[CALL_ID]AbC123xyZ[ARGS]{\"city\": \"[TOOL_CALLS]\"}[TOOL_CALLS]now[ARGS]{}",
        markers: &["[TOOL_CALLS]", "[THINK]", "[/THINK]", "[CALL_ID]", "[ARGS]"],
        thought: "Hm.",
        content: "",
        calls: &[("weather", "{\"city\": \"[TOOL_CALLS]\"}"), ("now", "{}")],
    },
    Sample {
        format: "deepseek",
        reasoning: "think",
        output: "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"city\": \"```\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        markers: DEEPSEEK,
        thought: "",
        content: "I look.",
        calls: &[("weather", "{\"city\": \"```\"}"), ("now", "{}")],
    },
    Sample {
        format: "deepseek",
        reasoning: "think",
        output: "<think>Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"<｜tool▁call▁end｜>\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        markers: DEEPSEEK,
        thought: "Hm.",
        content: "I look.",
        calls: &[("weather", "{\"city\": \"<｜tool▁call▁end｜>\"}"), ("now", "{}")],
    },
    Sample {
        format: "dsml",
        reasoning: "think",
        output: "<think>Hm.</think>I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">12 </｜DSML｜parameter></｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        markers: &["<think>", "</think>"],
        thought: "Hm.",
        content: "I look.\n\n",
        calls: &[("weather", "{\"city\": \"12 </｜DSML｜parameter>\", \"days\": 5}"), ("now", "{}")],
    },
    Sample {
        format: "dsml",
        reasoning: "think",
        output: "<｜DSML｜ calls>\n<｜DSML｜ invoke name=\"weather\">\n<｜DSML｜ parameter name=\"options\" string=\"false\">{\"a\": [1]}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n<｜DSML｜ invoke name=\"now\">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
        markers: &[],
        thought: "",
        content: "",
        calls: &[("weather", "{\"options\": {\"a\": [1]}}"), ("now", "{}")],
    },
    Sample {
        format: "glm",
        reasoning: "think",
        output: "<think>Hm.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value> 1</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        markers: GLM,
        thought: "Hm.",
        content: "I look.\n",
        calls: &[("weather", "{\"city\": \"Bern</arg_value> 1\", \"days\": 3}"), ("now", "{}")],
    },
    Sample {
        format: "glm",
        reasoning: "think",
        output: "<tool_call>weather<arg_key>city</arg_key><arg_value>\n12\n</arg_value><arg_key>list</arg_key><arg_value>[1, \"a\"]</arg_value></tool_call><tool_call>now</tool_call>",
        markers: GLM,
        thought: "",
        content: "",
        calls: &[("weather", "{\"city\": \"\\n12\\n\", \"list\": [1, \"a\"]}"), ("now", "{}")],
    },
    Sample {
        format: "kimi",
        reasoning: "think",
        output: "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{\"city\": \"Bern\"}<|tool_call_end|><|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        markers: &[
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ],
        thought: "",
        content: "I look.",
        calls: &[("weather", "{\"city\": \"Bern\"}"), ("now", "{}")],
    },
    Sample {
        format: "minimax",
        reasoning: "think",
        output: "<think>\nHm.\n</think>\n\n<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Bern \"</parameter>\"</parameter>\n<parameter name=\"maybe\">7</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
        markers: &["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
        thought: "Hm.",
        content: "",
        calls: &[("weather", "{\"city\": \"Bern \\\"</parameter>\\\"\", \"maybe\": 7}"), ("now", "{}")],
    },
    Sample {
        format: "harmony",
        reasoning: "none",
        output: "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Bern\"}<|call|><|start|>assistant<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
        markers: &[
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|return|>",
            "<|call|>",
        ],
        thought: "Hm.",
        content: "I look.",
        calls: &[("weather", "{\"city\": \"Bern\"}"), ("now", "{}")],
    },
];

const DEEPSEEK: &[&str] = &[
    "<think>",
    "</think>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];

const GLM: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
];

impl Sample {
    fn check(&self, markers: &[&str]) {
        let parser = dialect(self.format, self.reasoning, markers).parser(request());
        let answer = answer(parser, &tokens(self.output, markers));
        assert_eq!(answer.reasoning, self.thought, "{}", self.output);
        assert_eq!(answer.content, self.content, "{}", self.output);
        assert_eq!(calls(&answer), self.calls, "{}", self.output);
        assert!(answer.calls.iter().all(|call| call.ended), "{answer:?}");
        for call in &answer.calls {
            serde_json::from_str::<serde_json::Value>(&call.arguments).unwrap();
        }
    }
}

#[test]
fn markers_may_be_tokens() {
    SAMPLES.iter().for_each(|sample| sample.check(sample.markers));
}

#[test]
fn markers_may_be_text() {
    SAMPLES.iter().for_each(|sample| sample.check(&[]));
}

#[test]
fn special_tokens_may_come_without_their_text() {
    for sample in SAMPLES {
        let dialect = dialect(sample.format, sample.reasoning, sample.markers);
        let mut tokens = tokens(sample.output, sample.markers);
        let whole = answer(dialect.parser(request()), &tokens);
        for (id, text) in &mut tokens {
            if *id != crate::support::WORD {
                text.clear();
            }
        }
        assert_eq!(answer(dialect.parser(request()), &tokens), whole, "{}", sample.output);
    }
}

#[test]
fn every_format_has_a_sample() {
    for format in tutti_formats::Format::all() {
        assert!(SAMPLES.iter().any(|sample| sample.format == format.name()), "{}", format.name());
    }
}
