//! Chat templates of a checkpoint, rendered with a client's messages.

use serde_json::Map;

use crate::text::template::{ChatTemplate, Message, RenderOptions};

/// Maximum size of a rendered text, in bytes.
const MAX_BYTES: usize = 16 << 10;

/// Renders (role, content) messages with a template. `source` is a template, or a `tokenizer_config.json` that contains
/// one. `variables` is the JSON of the template's variables.
pub fn chat_template(source: &[u8], variables: &[u8], messages: &[(&str, &str)], flags: u8) {
    // A single repetition, as in `text * n`, may take 100 MB even within the limit of instructions. Templates are
    // trusted not to do that (docs/security.md). Sources with `*` are skipped, because repetitions would hide other
    // uses of memory.
    if source.contains(&b'*') {
        return;
    }
    let (config, jinja) = if flags & 1 == 0 { (None, Some(source)) } else { (Some(source), None) };
    let Ok(Some(template)) = ChatTemplate::read(config, jinja) else { return };
    let messages: Vec<Message> = messages
        .iter()
        .map(|(role, content)| Message {
            role: (*role).into(),
            content: (*content).into(),
            name: None,
            media_at: Vec::new(),
        })
        .collect();
    let variables: Map<_, _> = serde_json::from_slice(variables).unwrap_or_default();
    let continue_final_message = flags & 2 != 0;
    let options = RenderOptions { add_generation_prompt: flags & 4 != 0, continue_final_message, variables };
    let rendered = template.render(&messages, &options, MAX_BYTES);
    if let Ok(text) = &rendered {
        assert!(text.len() <= MAX_BYTES, "{} bytes, over the limit of {MAX_BYTES}", text.len());
        if continue_final_message {
            let last = messages.last().map_or("", |message| message.content.trim());
            assert!(text.ends_with(last), "the text goes on after the message that is to be continued");
        }
    }
    // Two renderings may differ only in the time of day.
    if !source.windows(12).any(|window| window == b"strftime_now") {
        assert_eq!(template.render(&messages, &options, MAX_BYTES).ok(), rendered.ok());
    }
}
