//! Markers: the texts by which a format sets its calls and its reasoning off from content.

use std::collections::HashMap;

/// The tokens of a tokenizer that may be markers: text and id of each added token.
///
/// A marker that is a token here is found by its id alone. The same text spelled by other tokens is text, as it is in
/// prompts, where the router keeps clients from spelling control tokens. A marker that is no token is found by its
/// text.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    ids: HashMap<String, u32>,
}

impl FromIterator<(String, u32)> for Vocabulary {
    fn from_iter<T: IntoIterator<Item = (String, u32)>>(tokens: T) -> Self {
        Self { ids: tokens.into_iter().collect() }
    }
}

impl Vocabulary {
    /// The token with this text.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// True if a token's text has this part.
    pub(crate) fn has_part(&self, part: &str) -> bool {
        self.ids.keys().any(|text| text.contains(part))
    }
}

/// Makes the markers of one parser, and remembers the tokens among them.
pub(crate) struct Lexicon<'a> {
    vocabulary: &'a Vocabulary,
    /// Text of each token that is a marker.
    pub tokens: HashMap<u32, String>,
}

impl<'a> Lexicon<'a> {
    pub fn new(vocabulary: &'a Vocabulary) -> Self {
        Self { vocabulary, tokens: HashMap::new() }
    }

    /// The set of these markers. No marker may begin with another one.
    pub fn markers<'t>(&mut self, texts: impl IntoIterator<Item = &'t str>) -> Markers {
        let mut set = Markers { markers: Vec::new(), firsts: [false; 256] };
        for text in texts {
            let id = self.vocabulary.id(text);
            self.tokens.extend(id.map(|id| (id, text.to_owned())));
            set.firsts[usize::from(text.as_bytes()[0])] = true;
            set.markers.push(Marker { text: text.to_owned(), id });
        }
        set
    }

    /// True if the marker is one token.
    pub fn is_token(&self, text: &str) -> bool {
        self.vocabulary.ids.contains_key(text)
    }
}

/// One marker.
#[derive(Clone, Debug)]
pub(super) struct Marker {
    pub text: String,
    /// Its token, if it is one.
    pub id: Option<u32>,
}

/// Markers that are looked for at the same time. A marker is named by its position in the set.
#[derive(Clone, Debug)]
pub(crate) struct Markers {
    pub(super) markers: Vec<Marker>,
    /// First bytes of the markers.
    pub(super) firsts: [bool; 256],
}
