//! The position of a value inside a constraint, as clients read it: `schema.properties.a.items[0]`.

use std::fmt;

/// Maximum length in bytes of a member's name in a position. Clients choose names.
const MAX_NAME: usize = 40;

/// A position. It borrows the names on the way from the root, and becomes text in errors only.
#[derive(Clone, Copy)]
pub(crate) struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    step: Step<'a>,
}

#[derive(Clone, Copy)]
enum Step<'a> {
    Member(&'a str),
    Element(usize),
}

impl<'a> Path<'a> {
    pub(crate) fn root(name: &'a str) -> Self {
        Self { parent: None, step: Step::Member(name) }
    }

    pub(crate) fn member(&'a self, name: &'a str) -> Self {
        Self { parent: Some(self), step: Step::Member(name) }
    }

    pub(crate) fn element(&'a self, n: usize) -> Self {
        Self { parent: Some(self), step: Step::Element(n) }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(parent) = self.parent else {
            return match self.step {
                Step::Member(name) => f.write_str(name),
                Step::Element(n) => write!(f, "[{n}]"),
            };
        };
        parent.fmt(f)?;
        match self.step {
            Step::Element(n) => write!(f, "[{n}]"),
            Step::Member(name) if is_plain(name) => write!(f, ".{name}"),
            Step::Member(name) if name.len() <= MAX_NAME => write!(f, "[{name:?}]"),
            Step::Member(name) => write!(f, "[{:?}…]", &name[..name.floor_char_boundary(MAX_NAME)]),
        }
    }
}

/// True if a name needs no quotes.
fn is_plain(name: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$' || c == '-';
    !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(is_word)
}
