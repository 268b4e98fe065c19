//! Templates of families whose published ones no package has as a file, written from descriptions of their formats.
//! They use what the published ones use. `tests/texts` compares the others with transformers.

use serde_json::json;

use super::*;

/// A turn with tools: a question, a call with these arguments, and its result.
fn rendered(source: &str, id: &str, variables: serde_json::Value) -> Result<String, Error> {
    let arguments = json!({ "city": "Bern", "days": 2, "more": { "b": [1, null], "a": true } });
    let call = ToolCall {
        id: Some(id.into()),
        name: "weather".into(),
        arguments: arguments.as_object().unwrap().clone(),
    };
    let tool =
        json!({ "type": "function", "function": { "name": "weather", "parameters": { "type": "object" } } });
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "Weather?"),
        Message { calls: vec![call], reasoning: Some("Hm.".into()), ..Message::new("assistant", "") },
        Message { call_id: Some(id.into()), ..Message::new("tool", "sunny") },
    ];
    let options =
        RenderOptions { variables: variables.as_object().unwrap().clone(), tools: vec![tool], ..prompt() };
    let template = read(json!({ "chat_template": source, "bos_token": "<s>", "eos_token": "</s>" }));
    template.render(&messages, &options, MAX)
}

const MISTRAL: &str = "
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set questions = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set count = namespace(turns=0) %}
{%- for turn in turns if turn.role != 'tool' and turn.tool_calls is not defined %}
    {%- if (turn.role == 'user') != (count.turns % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}
    {%- set count.turns = count.turns + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}
        {%- if tools is not none and turn == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] ' }}{{ tools | map(attribute='function') | list | tojson }}{{ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.last or loop.first else '') + turn.content + '[/INST]' }}
    {%- elif turn.tool_calls is defined and turn.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in turn.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif turn.role == 'tool' %}
        {{- '[TOOL_RESULTS] {\"content\": ' + turn.content | string + ', \"call_id\": \"' + turn.tool_call_id + '\"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}";

#[test]
fn mistral_shows_ids_of_nine_characters_and_refuses_others() {
    let expected = "<s>[AVAILABLE_TOOLS] [{\"name\": \"weather\", \"parameters\": {\"type\": \"object\"}}][/AVAILABLE_TOOLS]\
        [INST] Be brief.\n\nWeather?[/INST][TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \
        \"days\": 2, \"more\": {\"b\": [1, null], \"a\": true}}, \"id\": \"AbC123xyZ\"}]</s>[TOOL_RESULTS] \
        {\"content\": sunny, \"call_id\": \"AbC123xyZ\"}[/TOOL_RESULTS]";
    assert_eq!(rendered(MISTRAL, "AbC123xyZ", json!({})).unwrap(), expected);
    let error = rendered(MISTRAL, "call_1", json!({})).unwrap_err();
    assert!(error.message().contains("nine characters"), "{error}");
}

const DEEPSEEK: &str = "
{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- set ns = namespace(system='', is_first=true) %}
{%- for m in messages if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endfor %}
{{- bos_token ~ ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}
    {%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}
        {{- '<｜Assistant｜></think>' }}
        {%- for c in m['tool_calls'] %}
            {%- if ns.is_first %}{{ '<｜tool▁calls▁begin｜>' }}{% set ns.is_first = false %}{% endif %}
            {{- '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments']|tojson + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜>' }}
    {%- endif %}
    {%- if m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}";

#[test]
fn deepseek_closes_or_opens_its_block_by_a_variable() {
    let text = rendered(DEEPSEEK, "a", json!({})).unwrap();
    assert!(
        text.starts_with("<s>Be brief.<｜User｜>Weather?<｜Assistant｜></think><｜tool▁calls▁begin｜>"),
        "{text}"
    );
    assert!(text.contains("weather<｜tool▁sep｜>{\"city\": \"Bern\", \"days\": 2, \"more\""), "{text}");
    assert!(text.ends_with("<｜Assistant｜></think>"), "{text}");
    assert!(rendered(DEEPSEEK, "a", json!({ "thinking": true })).unwrap().ends_with("<think>"));
}

const KIMI: &str = "
{%- macro calls_of(message) -%}
<|tool_calls_section_begin|>
{%- for call in message['tool_calls'] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else %}{{ call['function']['arguments'] | tojson }}{% endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- set name = message.get('name') or message['role'] -%}
<|im_{{ message['role'] }}|>{{ name }}<|im_middle|>
{%- if message['role'] == 'assistant' and message.get('tool_calls') -%}{{ message['content'] }}{{ calls_of(message) }}
{%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}\n{{ message['content'] }}
{%- elif message['content'] is string -%}{{ message['content'] }}{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}";

#[test]
fn kimi_shows_ids_of_any_form() {
    for id in ["functions.weather:0", "functions_weather_0", "call00003"] {
        let text = rendered(KIMI, id, json!({})).unwrap();
        assert!(text.starts_with("<|im_system|>tool_declare<|im_middle|>[{\"type\":\"function\","), "{text}");
        assert!(
            text.contains(&format!(
                "<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{\"city\": \"Bern\""
            )),
            "{text}"
        );
        assert!(text.contains(&format!("## Return of {id}\nsunny<|im_end|>")), "{text}");
    }
}

const MINIMAX: &str = "
{%- macro shown(value) -%}{%- if value is string -%}{{ value }}{%- else -%}{{ value | tojson(ensure_ascii=False) }}{%- endif -%}{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
    {%- if message.reasoning_content is string and loop.index0 > 1 -%}<think>{{ message.reasoning_content }}</think>{%- endif -%}
    {%- if message.tool_calls -%}
    {{- '<minimax:tool_call>' -}}
    {%- for call in message.tool_calls -%}
        {%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
        {{- '<invoke name=\"' + call.name + '\">' -}}
        {%- for key, value in call.arguments.items() -%}
            {{- '<parameter name=\"' + key + '\">' -}}{{- shown(value) -}}{{- '</parameter>' -}}
        {%- endfor -%}
        {{- '</invoke>' -}}
    {%- endfor -%}
    {{- '</minimax:tool_call>' -}}
    {%- endif -%}
{%- elif message.role == 'tool' -%}
    {%- if loop.previtem.role != 'tool' -%}{{- ']~b]tool' -}}{%- endif -%}
    {{- '<response>' + message.content + '</response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '[e~[' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}";

#[test]
fn minimax_iterates_over_arguments() {
    let expected = "<think>Hm.</think><minimax:tool_call><invoke name=\"weather\"><parameter name=\"city\">Bern</parameter>\
        <parameter name=\"days\">2</parameter><parameter name=\"more\">{\"b\": [1, null], \"a\": true}</parameter>\
        </invoke></minimax:tool_call>]~b]tool<response>sunny</response>[e~[";
    assert_eq!(rendered(MINIMAX, "a", json!({})).unwrap(), expected);
}

const PYTHONIC: &str = "
{%- for message in messages -%}
{%- if message.tool_calls is defined -%}
[{%- for call in message.tool_calls -%}{{ call.function.name }}(
    {%- for key in call.function.arguments -%}
        {{ key }}={{ call.function.arguments[key] | tojson }}{{ ', ' if not loop.last }}
    {%- endfor -%}){{ ', ' if not loop.last }}{%- endfor -%}]<|eot|>
{%- elif message.role in ['tool', 'ipython'] -%}<|header_start|>ipython<|header_end|>{{ message.content }}<|eot|>
{%- endif -%}
{%- endfor -%}";

#[test]
fn llama_4_writes_calls_like_python() {
    let expected = "[weather(city=\"Bern\", days=2, more={\"b\": [1, null], \"a\": true})]<|eot|>\
        <|header_start|>ipython<|header_end|>sunny<|eot|>";
    assert_eq!(rendered(PYTHONIC, "a", json!({})).unwrap(), expected);
}
