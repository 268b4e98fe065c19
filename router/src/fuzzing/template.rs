//! Chat templates of a checkpoint, rendered with a client's messages.

use serde_json::Map;

use crate::text::template::{ChatTemplate, Message, RenderOptions};

/// Maximum size of a rendered text, in bytes.
const MAX_BYTES: usize = 16 << 10;
/// The mark at the end of a message that is continued.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG";

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
    let given: Vec<Message> = messages.iter().map(|(role, content)| Message::new(*role, *content)).collect();
    let variables: Map<_, _> = serde_json::from_slice(variables).unwrap_or_default();
    let continue_final_message = flags & 2 != 0;
    let add_generation_prompt = flags & 4 != 0;
    let options =
        RenderOptions { add_generation_prompt, continue_final_message, variables, ..RenderOptions::default() };
    let rendered = template.render(&given, &options, MAX_BYTES);
    if let Ok(text) = &rendered {
        assert!(text.len() <= MAX_BYTES, "{} bytes, over the limit of {MAX_BYTES}", text.len());
        let marks: usize = messages.iter().map(|(_, content)| content.matches(MARK).count()).sum();
        assert!(!continue_final_message || text.matches(MARK).count() <= marks, "the mark is in the text");
    }
    // Two renderings may differ only in the time of day.
    if !source.windows(12).any(|window| window == b"strftime_now") {
        assert_eq!(template.render(&given, &options, MAX_BYTES).ok(), rendered.ok());
    }
}
