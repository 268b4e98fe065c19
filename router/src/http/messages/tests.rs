use tutti_proto::cluster::v1::MediaKind;

use super::*;
use crate::generation::Detail;

fn conversation(body: &str) -> Result<(Conversation, Vec<Media>), Error> {
    let mut fields = Fields::of_body(body.as_bytes(), Scope::Chat)?;
    let Given { prompt, media, .. } = take(&mut fields)?;
    fields.finish()?;
    let Prompt::Chat { conversation, .. } = prompt else { panic!("messages are a chat") };
    Ok((conversation, media))
}

fn refused(body: &str) -> String {
    conversation(body).err().unwrap().field().unwrap().to_owned()
}

#[test]
fn text_parts_are_kept() {
    let body = r#"{"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}"#;
    let (conversation, _) = conversation(body).unwrap();
    let parts = vec![ContentPart::Text("a".into()), ContentPart::Text("b".into())];
    assert_eq!(conversation.messages[0].content, Content::List(parts));
    assert!(conversation.options.add_generation_prompt);
}

#[test]
fn audio_keeps_its_position_between_text_parts() {
    let body = r#"{"messages": [{"role": "user", "content": [
        {"type": "text", "text": "é"}, {"type": "input_audio", "input_audio": {"data": "AQI=", "format": "wav"}},
        {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]}"#;
    let (conversation, media) = conversation(body).unwrap();
    let text = |text: &str| ContentPart::Text(text.into());
    let audio = ContentPart::Media { kind: MediaKind::Audio, placeholder: String::new() };
    let parts = vec![text("é"), audio, text("b"), text("c")];
    assert_eq!(conversation.messages[0].content, Content::List(parts));
    let path = "messages[0].content[1].input_audio".to_owned();
    let (kind, format, data) = (MediaKind::Audio, "wav".into(), vec![vec![1, 2]]);
    let (detail, is_sound_of_video) = (Detail::Full, false);
    let expected = Media { path, kind, format, data, url: None, fps: None, detail, is_sound_of_video };
    assert_eq!(media, [expected]);
}

const VIDEO: &str = r#"{"type": "video_url", "video_url": {"url": "data:video/png;base64,AQ==", "fps": 2}}"#;
const SOUND: &str = r#"{"type": "input_audio", "input_audio": {"data": "AQI=", "format": "wav"}}"#;
const TEXT: &str = r#"{"type": "text", "text": "a"}"#;
const WITH_SOUND: &str = r#"{"use_audio_in_video": true}"#;

fn parts_with(options: &str, parts: &[&str]) -> String {
    let parts = parts.join(",");
    format!(r#"{{"mm_processor_kwargs": {options}, "messages": [{{"role": "user", "content": [{parts}]}}]}}"#)
}

#[test]
fn the_part_behind_a_video_is_its_sound_if_the_client_says_so() {
    let kinds = |options: &str| {
        let body = parts_with(options, &[TEXT, SOUND, VIDEO, SOUND, TEXT, SOUND]);
        let (conversation, media) = conversation(&body).unwrap();
        let Content::List(parts) = &conversation.messages[0].content else { panic!("a list") };
        (parts.len(), media.iter().map(|item| item.is_sound_of_video).collect::<Vec<_>>())
    };
    // Sound of a video is no part for the template.
    assert_eq!(kinds(WITH_SOUND), (5, vec![false, false, true, false]));
    for without in [r#"{"use_audio_in_video": false}"#, "{}", "null"] {
        assert_eq!(kinds(without), (6, vec![false; 4]));
    }
    assert_eq!(conversation(&parts_with(WITH_SOUND, &[TEXT])).unwrap().1, [], "there is no video");
}

#[test]
fn a_video_without_sound_and_other_options_are_refused() {
    let refused = |options: &str, parts: &[&str], field: &str, words: &str| {
        let error = conversation(&parts_with(options, parts)).unwrap_err();
        assert!(error.field() == Some(field) && error.message().contains(words), "{error:?}");
    };
    let video = "messages[0].content[0].video_url";
    for parts in [&[VIDEO][..], &[VIDEO, TEXT, SOUND], &[VIDEO, VIDEO, SOUND]] {
        refused(WITH_SOUND, parts, video, "has no sound: with use_audio_in_video");
    }
    refused(r#"{"min_pixels": 4}"#, &[TEXT], "mm_processor_kwargs.min_pixels", "not a parameter");
    let text = r#"{"use_audio_in_video": "yes"}"#;
    refused(text, &[TEXT], "mm_processor_kwargs.use_audio_in_video", "");
}

#[test]
fn an_assistant_message_from_the_openai_client_is_accepted() {
    let body = r#"{"messages": [{"role": "assistant", "content": "hi", "refusal": null, "annotations": null,
        "audio": null, "function_call": null, "tool_calls": null}]}"#;
    assert_eq!(conversation(body).unwrap().0.messages[0].content, Content::Text("hi".into()));
}

#[test]
fn an_assistant_message_may_have_no_content() {
    for content in [r#", "content": null"#, ""] {
        let body = format!(r#"{{"messages": [{{"role": "assistant"{content}}}]}}"#);
        assert_eq!(conversation(&body).unwrap().0.messages[0].content, Content::Text(String::new()));
    }
    assert_eq!(refused(r#"{"messages": [{"role": "user", "content": null}]}"#), "messages[0].content");
}

#[test]
fn errors_name_the_full_path_of_the_member() {
    assert_eq!(refused(r#"{"messages": []}"#), "messages");
    assert_eq!(refused(r#"{"messages": [{"content": "x"}]}"#), "messages[0].role");
    assert_eq!(refused(r#"{"messages": [{"role": "user"}]}"#), "messages[0].content");
    assert_eq!(refused(r#"{"messages": [{"role": "user", "content": 7}]}"#), "messages[0].content");
    let image = r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}"#;
    assert_eq!(refused(image), "messages[0].content[0].image_url.url");
    let file = r#"{"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}"#;
    assert_eq!(refused(file), "messages[0].content[0].type");
    let audio = |audio: &str| {
        let part = format!(r#"{{"type": "input_audio", "input_audio": {audio}}}"#);
        refused(&format!(r#"{{"messages": [{{"role": "user", "content": [{part}]}}]}}"#))
    };
    let path = "messages[0].content[0].input_audio";
    assert_eq!(audio(r#"{"data": "A", "format": "wav"}"#), format!("{path}.data"));
    assert_eq!(audio(r#"{"data": "AQI="}"#), format!("{path}.format"));
    assert_eq!(audio(r#"{"data": "AQI=", "format": "wav", "id": 1}"#), format!("{path}.id"));
    let tools = r#"{"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}"#;
    assert_eq!(refused(tools), "messages[0].tool_calls[0]");
}
