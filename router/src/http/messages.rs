//! Chat messages: roles and text. What else OpenAI's messages may carry is refused by name.

use serde_json::{json, value::RawValue};
use tutti_runtime::Error;

use super::fields::{self, Fields};
use crate::{
    generation::Prompt,
    text::template::{Message, RenderOptions},
};

/// What a conversation becomes a prompt by.
pub struct Conversation {
    /// The turns so far; at least one.
    pub messages: Vec<Message>,
    /// How the template is asked.
    pub options: RenderOptions,
    /// Whether special tokens are added to what the template gives; templates write their own.
    pub add_special_tokens: bool,
}

impl From<Conversation> for Prompt {
    fn from(conversation: Conversation) -> Self {
        let Conversation { messages, options, add_special_tokens } = conversation;
        Self::Chat { messages, options, add_special_tokens }
    }
}

/// Takes the members that make a conversation.
pub fn take(fields: &mut Fields<'_>) -> Result<Conversation, Error> {
    let given: Vec<&RawValue> = fields.require("messages")?;
    if given.is_empty() {
        return Err(Error::invalid("messages", "is empty"));
    }
    let messages = given
        .into_iter()
        .enumerate()
        .map(|(i, value)| message(&format!("messages[{i}]"), value))
        .collect::<Result<_, _>>()?;
    let continue_final_message: bool = fields.take_or_default("continue_final_message")?;
    let add_generation_prompt: Option<bool> = fields.take("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        let message =
            "cannot be true together with add_generation_prompt: a turn is either continued or begun";
        return Err(Error::invalid("continue_final_message", message));
    }
    let options = RenderOptions {
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        variables: fields.take_or_default("chat_template_kwargs")?,
    };
    fields.refuse("chat_template", &[], "the checkpoint's own template is used")?;
    let add_special_tokens = fields.take_or_default("add_special_tokens")?;
    Ok(Conversation { messages, options, add_special_tokens })
}

fn message(path: &str, value: &RawValue) -> Result<Message, Error> {
    let mut fields = Fields::of_value(path, value)?;
    let role = fields.require("role")?;
    let name = fields.take("name")?;
    for member in ["tool_calls", "tool_call_id", "function_call"] {
        fields.refuse(member, &[json!([])], "tools are not available")?;
    }
    fields.refuse("audio", &[], "the model takes text only")?;
    // Members of OpenAI's answers that a client sends back with the conversation.
    fields.ignore(&["refusal", "annotations"]);
    let content_name = fields.name("content");
    let content = match fields.take_raw("content") {
        None => return Err(Error::invalid(content_name, "is required")),
        Some(value) if value.get().starts_with('[') => parts(&content_name, value)?,
        Some(value) => fields::parse(&content_name, value)?,
    };
    fields.finish()?;
    Ok(Message { role, content, name })
}

/// Text parts, a line each.
fn parts(path: &str, value: &RawValue) -> Result<String, Error> {
    let parts: Vec<&RawValue> = fields::parse(path, value)?;
    let texts = parts
        .into_iter()
        .enumerate()
        .map(|(i, part)| {
            let mut fields = Fields::of_value(&format!("{path}[{i}]"), part)?;
            let kind: String = fields.require("type")?;
            if kind != "text" {
                let message = format!("{kind:?} is not supported: the model takes text only");
                return Err(Error::invalid(fields.name("type"), message));
            }
            let text: String = fields.require("text")?;
            fields.finish()?;
            Ok(text)
        })
        .collect::<Result<Vec<_>, Error>>()?;
    Ok(texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(body: &str) -> Result<Conversation, Error> {
        let mut fields = Fields::of_body(body.as_bytes())?;
        let conversation = take(&mut fields)?;
        fields.finish()?;
        Ok(conversation)
    }

    fn refused(body: &str) -> String {
        conversation(body).err().unwrap().field().unwrap().to_owned()
    }

    #[test]
    fn text_parts_become_lines() {
        let body = r#"{"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#;
        let conversation = conversation(body).unwrap();
        assert_eq!(conversation.messages[0].content, "a\nb");
        assert!(conversation.options.add_generation_prompt);
    }

    #[test]
    fn an_assistant_message_as_the_openai_client_gives_it_back_is_taken() {
        let body = r#"{"messages": [{"role": "assistant", "content": "hi", "refusal": null, "annotations": null,
            "audio": null, "function_call": null, "tool_calls": null}]}"#;
        assert_eq!(conversation(body).unwrap().messages[0].content, "hi");
    }

    #[test]
    fn what_is_wrong_is_named_to_the_part() {
        assert_eq!(refused(r#"{"messages": []}"#), "messages");
        assert_eq!(refused(r#"{"messages": [{"content": "x"}]}"#), "messages[0].role");
        assert_eq!(refused(r#"{"messages": [{"role": "user"}]}"#), "messages[0].content");
        assert_eq!(refused(r#"{"messages": [{"role": "user", "content": 7}]}"#), "messages[0].content");
        let image =
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}"#;
        assert_eq!(refused(image), "messages[0].content[0].type");
        let tools = r#"{"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}"#;
        assert_eq!(refused(tools), "messages[0].tool_calls");
    }
}
