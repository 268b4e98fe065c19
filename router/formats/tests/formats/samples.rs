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
        output: r#"<think>
Two calls, 1 < 2.
</think>

I look.
<tool_call>
{"name": "weather", "arguments": {"city": "Zürich \"}</tool_call>", "days": 2}}
</tool_call>
<tool_call>
{"arguments": {}, "name": "now"}
</tool_call>
"#,
        markers: THINK,
        thought: "Two calls, 1 < 2.",
        content: "I look.\n",
        calls: &[("weather", "{\"city\": \"Zürich \\\"}</tool_call>\", \"days\": 2}"), ("now", "{}")],
    },
    Sample {
        format: "qwen_xml",
        reasoning: "think",
        output: r#"<think>
Hm.
</think>

<tool_call>
<function=weather>
<parameter=city>
Bern
"</parameter>" </tool_call>

</parameter>
<parameter=days>
3
</parameter>
<parameter=exact>
True
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"#,
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
        output: r#"<|python_tag|>{"name": "weather", "parameters": {"city": "Bern; {", "days": 1}}; {"type": "function", "name": "now", "parameters": {}}"#,
        markers: &["<|python_tag|>"],
        thought: "",
        content: "",
        calls: &[("weather", "{\"city\": \"Bern; {\", \"days\": 1}"), ("now", "{}")],
    },
    Sample {
        format: "pythonic",
        reasoning: "none",
        output: r#"[weather(city='O\'Hare [1]', days=2, list=[1, (2, None), {'a': True},], share=1.5), now()]"#,
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
        output: r#"I look. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "[Bern]"}}, {"name": "now", "arguments": {}, "id": "abcdefghi"}]"#,
        markers: &["[TOOL_CALLS]"],
        thought: "",
        content: "I look. ",
        calls: &[("weather", "{\"city\": \"[Bern]\"}"), ("now", "{}")],
    },
    Sample {
        format: "mistral",
        reasoning: "mistral",
        output: r#"[THINK]Hm.[/THINK][TOOL_CALLS]weather[CALL_ID]AbC123xyZ[ARGS]{"city": "[TOOL_CALLS]"}[TOOL_CALLS]now[ARGS]{}"#,
        markers: &["[TOOL_CALLS]", "[THINK]", "[/THINK]", "[CALL_ID]", "[ARGS]"],
        thought: "Hm.",
        content: "",
        calls: &[("weather", "{\"city\": \"[TOOL_CALLS]\"}"), ("now", "{}")],
    },
    Sample {
        format: "deepseek",
        reasoning: "think",
        output: r#"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
```json
{"city": "```"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>now
```json
{}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"#,
        markers: DEEPSEEK,
        thought: "",
        content: "I look.",
        calls: &[("weather", "{\"city\": \"```\"}"), ("now", "{}")],
    },
    Sample {
        format: "deepseek",
        reasoning: "think",
        output: r#"<think>Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"#,
        markers: DEEPSEEK,
        thought: "Hm.",
        content: "I look.",
        calls: &[("weather", "{\"city\": \"<｜tool▁call▁end｜>\"}"), ("now", "{}")],
    },
    Sample {
        format: "dsml",
        reasoning: "think",
        output: r#"<think>Hm.</think>I look.

<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">12 </｜DSML｜parameter></｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
</｜DSML｜invoke>
</｜DSML｜function_calls>"#,
        markers: &["<think>", "</think>"],
        thought: "Hm.",
        content: "I look.\n\n",
        calls: &[("weather", "{\"city\": \"12 </｜DSML｜parameter>\", \"days\": 5}"), ("now", "{}")],
    },
    Sample {
        format: "dsml",
        reasoning: "think",
        output: r#"<｜DSML｜ calls>
<｜DSML｜ invoke name="weather">
<｜DSML｜ parameter name="options" string="false">{"a": [1]}</｜DSML｜ parameter>
</｜DSML｜ invoke>
<｜DSML｜ invoke name="now">
</｜DSML｜ invoke>
</｜DSML｜ calls>"#,
        markers: &[],
        thought: "",
        content: "",
        calls: &[("weather", "{\"options\": {\"a\": [1]}}"), ("now", "{}")],
    },
    Sample {
        format: "glm",
        reasoning: "think",
        output: r#"<think>Hm.</think>
I look.
<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Bern</arg_value> 1</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
</tool_call>
<tool_call>now
</tool_call>"#,
        markers: GLM,
        thought: "Hm.",
        content: "I look.\n",
        calls: &[("weather", "{\"city\": \"Bern</arg_value> 1\", \"days\": 3}"), ("now", "{}")],
    },
    Sample {
        format: "glm",
        reasoning: "think",
        output: r#"<tool_call>weather<arg_key>city</arg_key><arg_value>
12
</arg_value><arg_key>list</arg_key><arg_value>[1, "a"]</arg_value></tool_call><tool_call>now</tool_call>"#,
        markers: GLM,
        thought: "",
        content: "",
        calls: &[("weather", "{\"city\": \"\\n12\\n\", \"list\": [1, \"a\"]}"), ("now", "{}")],
    },
    Sample {
        format: "kimi",
        reasoning: "think",
        output: r#"I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|><|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"#,
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
        output: r#"<think>
Hm.
</think>

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Bern "</parameter>"</parameter>
<parameter name="maybe">7</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>"#,
        markers: &["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
        thought: "Hm.",
        content: "",
        calls: &[("weather", "{\"city\": \"Bern \\\"</parameter>\\\"\", \"maybe\": 7}"), ("now", "{}")],
    },
    Sample {
        format: "harmony",
        reasoning: "none",
        output: r#"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|><|start|>assistant<|channel|>analysis to=functions.now code<|message|>{}<|call|>"#,
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
