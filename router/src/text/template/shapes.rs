//! Finds out in which shape a template reads the content of messages, by rendering short conversations.
//!
//! vLLM and SGLang look for a loop over the content in the template's syntax tree. To render answers the same question,
//! and finds a template that shows only the first part.

use minijinja::Value;
use tutti_proto::cluster::v1::MediaKind;

use super::message::{ArgumentShape, Content, ContentPart, Message, Shape, ToolCall};

/// A text of two words on two lines. The line break distinguishes a text from Python's or JSON's writing of it.
struct Probe {
    text: &'static str,
    words: [&'static str; 2],
}

const ONE: Probe = Probe { text: "firstprobe\nitsend", words: ["firstprobe", "itsend"] };
const OTHER: Probe = Probe { text: "secondprobe\nitsclose", words: ["secondprobe", "itsclose"] };

impl Probe {
    /// True if a rendered text shows the probe. Templates may change white space and case, as by `trim`, `split` and
    /// `capitalize`. A text that stands for the message, and not for a part of it, may also be written as JSON.
    fn is_in(&self, rendered: &str, shape: Shape) -> bool {
        let rendered = rendered.to_lowercase();
        let [first, last] = self.words;
        rendered
            .split(first)
            .skip(1)
            .any(|rest| rest.find(last).is_some_and(|at| shape == Shape::Text || !rest[..at].contains('\\')))
    }
}

/// The content that a template shows, of messages of one role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shapes {
    /// How the template shows a text.
    text: Shown,
    /// How it shows a list of parts.
    parts: Shown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// All of it.
    All,
    /// The first part alone.
    First,
    /// Nothing, without an error.
    Lost,
    /// The template refuses it.
    Refused,
}

impl ArgumentShape {
    /// Finds the shape in which a template reads arguments. Templates that join them to texts refuse objects.
    pub fn find(render: &dyn Fn(&[Value]) -> Option<String>) -> Self {
        let call = ToolCall {
            // Templates of Mistral refuse ids of other lengths.
            id: Some("callprobe".to_owned()),
            name: "probe".to_owned(),
            arguments: [("key".to_owned(), ONE.words[0].into())].into_iter().collect(),
        };
        let shows = |arguments: Self| {
            let asked = Message::new("user", "other").shaped(Shape::Text, arguments, &[]);
            let called = Message { calls: vec![call.clone()], ..Message::new("assistant", "") };
            let rendered = render(&[asked, called.shaped(Shape::Text, arguments, &[])]);
            rendered.is_some_and(|text| text.contains(ONE.words[0]))
        };
        if !shows(Self::Object) && shows(Self::Json) { Self::Json } else { Self::Object }
    }
}

/// Finds the kinds of media for which a template writes something when it goes through a message's parts: its own
/// sentinels around a placeholder. `render` renders messages, and returns `None` if the template refuses them.
pub fn find_sentinels(render: &dyn Fn(&[Value]) -> Option<String>) -> Vec<MediaKind> {
    let rendered = |kinds: &[MediaKind]| {
        let media = |kind: &MediaKind| ContentPart::Media { kind: *kind, placeholder: String::new() };
        let text = ContentPart::Text(ONE.text.to_owned());
        let parts = kinds.iter().map(media).chain([text]).collect();
        let message = Message { content: Content::List(parts), ..Message::new("user", "") };
        render(&[message.shaped(Shape::List, ArgumentShape::Object, kinds)])
    };
    let Some(without) = rendered(&[]) else { return Vec::new() };
    if !ONE.is_in(&without, Shape::List) {
        return Vec::new();
    }
    let is_written = |kind: &MediaKind| rendered(&[*kind]).is_some_and(|with| with != without);
    [MediaKind::Audio, MediaKind::Image, MediaKind::Video].into_iter().filter(is_written).collect()
}

impl Shapes {
    /// Finds the shapes for a role. `render` renders messages, and returns `None` if the template refuses them.
    pub fn find(role: &str, render: &dyn Fn(&[Value]) -> Option<String>) -> Self {
        let parts = |role: &str, texts: &[&str]| {
            let parts = texts.iter().map(|text| ContentPart::Text((*text).to_owned())).collect();
            Message { content: Content::List(parts), ..Message::new(role, "") }
        };
        let shown = |probe: Message, shape: Shape| {
            // The other messages have a shape of their own, because roles may be read in different ways.
            let tries = [Shape::Text, Shape::List].map(|others| {
                let other =
                    |role: &str| Message::new(role, "other").shaped(others, ArgumentShape::Object, &[]);
                let conversation = match role {
                    "system" => vec![probe.shaped(shape, ArgumentShape::Object, &[]), other("user")],
                    "assistant" => {
                        vec![other("user"), probe.shaped(shape, ArgumentShape::Object, &[]), other("user")]
                    }
                    _ => vec![probe.shaped(shape, ArgumentShape::Object, &[])],
                };
                match render(&conversation) {
                    None => Shown::Refused,
                    Some(text) if !ONE.is_in(&text, shape) => Shown::Lost,
                    Some(text) if shape == Shape::List && !OTHER.is_in(&text, shape) => Shown::First,
                    Some(_) => Shown::All,
                }
            });
            let best = |wanted| tries.iter().copied().find(|shown| *shown == wanted);
            best(Shown::All).or(best(Shown::First)).or(best(Shown::Lost)).unwrap_or(Shown::Refused)
        };
        Self {
            text: shown(Message::new(role, ONE.text), Shape::Text),
            parts: shown(parts(role, &[ONE.text, OTHER.text]), Shape::List),
        }
    }

    /// The shape for a message's content. `None` if the template would lose it.
    pub fn of(&self, content: &Content) -> Option<Shape> {
        let parts = match self.parts {
            Shown::All => Some(Shape::List),
            Shown::First => Some(Shape::OnePart),
            Shown::Lost | Shown::Refused => None,
        };
        let text = (self.text == Shown::All).then_some(Shape::Text);
        let fits = match content {
            Content::Text(_) => text.or(parts),
            Content::List(_) => parts.or(text),
        };
        // A template that refuses a role, such as `system`, says so itself.
        let is_refused = self.text == Shown::Refused;
        fits.or(is_refused.then_some(Shape::Text))
    }
}
