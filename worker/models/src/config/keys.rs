//! Reading of a JSON file's keys. Each key has one declaration, with the values that it may have
//! ([`ranges`](super::ranges)). Code can read a key only through its declaration, so no family uses an unchecked value.

use std::{fmt, marker::PhantomData};

use serde_json::{Map, Value};

use super::{ConfigFile, TokenIds};
use crate::LoadError;

/// Maximum number of characters of a value that an error shows.
const SHOWN: usize = 80;

/// The declaration of a key whose value is read as a `T`.
pub(crate) struct Key<T> {
    pub name: &'static str,
    rule: Rule,
    value: PhantomData<fn() -> T>,
}

/// The values that a key may have. Any key may also be missing or null.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// An integer in this range. `2.0` counts as an integer, too.
    Integer { least: u64, most: u64 },
    /// A number in this range.
    Number { least: Bound, most: f64 },
    /// True or false.
    Flag,
    /// Any text.
    Text,
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A list of integers, each in this range.
    Integers { entries: Entries, most: u64 },
    /// A list of numbers, each above 0 and at most `most`.
    Numbers { most_entries: usize, most: f64 },
    /// A list of texts.
    Texts { most_entries: usize },
    /// A token id, or a list of them.
    TokenIds { most_entries: usize },
    /// An object with further keys.
    Object,
    /// Any value. The code that reads the key checks the value.
    Any,
}

/// The lower end of a range of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bound {
    /// This number or a larger one.
    AtLeast(f64),
    /// A number larger than this one.
    Above(f64),
}

/// The length of a list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Entries {
    Exactly(usize),
    AtMost(usize),
}

impl<T> Key<T> {
    const fn new(name: &'static str, rule: Rule) -> Self {
        Self { name, rule, value: PhantomData }
    }
}

impl Key<usize> {
    /// Declares a key whose value is an integer from 1 to `most`.
    pub const fn size(name: &'static str, most: usize) -> Self {
        Self::new(name, Rule::Integer { least: 1, most: most as u64 })
    }

    /// Declares a key whose value is an integer from 0 to `most`.
    pub const fn count(name: &'static str, most: usize) -> Self {
        Self::new(name, Rule::Integer { least: 0, most: most as u64 })
    }

    /// Declares a key that has one value only.
    pub const fn exactly(name: &'static str, value: usize) -> Self {
        Self::new(name, Rule::Integer { least: value as u64, most: value as u64 })
    }
}

impl Key<u32> {
    /// Declares a key whose value is a token id.
    pub const fn token(name: &'static str) -> Self {
        Self::limit(name, u32::MAX)
    }

    /// Declares a key whose value is an integer from 0 to `most`.
    pub const fn limit(name: &'static str, most: u32) -> Self {
        Self::new(name, Rule::Integer { least: 0, most: most as u64 })
    }
}

impl Key<f64> {
    pub const fn number(name: &'static str, least: Bound, most: f64) -> Self {
        Self::new(name, Rule::Number { least, most })
    }
}

impl Key<bool> {
    pub const fn flag(name: &'static str) -> Self {
        Self::new(name, Rule::Flag)
    }
}

impl Key<String> {
    pub const fn text(name: &'static str) -> Self {
        Self::new(name, Rule::Text)
    }

    pub const fn choice(name: &'static str, choices: &'static [&'static str]) -> Self {
        Self::new(name, Rule::Choice(choices))
    }
}

impl Key<Vec<usize>> {
    pub const fn integers(name: &'static str, entries: Entries, most: usize) -> Self {
        Self::new(name, Rule::Integers { entries, most: most as u64 })
    }
}

impl Key<Vec<f64>> {
    /// Declares a key whose value is a list of numbers, each above 0 and at most `most`.
    pub const fn numbers(name: &'static str, most_entries: usize, most: f64) -> Self {
        Self::new(name, Rule::Numbers { most_entries, most })
    }
}

impl Key<Vec<String>> {
    pub const fn texts(name: &'static str, most_entries: usize) -> Self {
        Self::new(name, Rule::Texts { most_entries })
    }
}

impl Key<TokenIds> {
    pub const fn token_ids(name: &'static str, most_entries: usize) -> Self {
        Self::new(name, Rule::TokenIds { most_entries })
    }
}

impl Key<Value> {
    pub const fn any(name: &'static str) -> Self {
        Self::new(name, Rule::Any)
    }
}

/// Converts a value to an integer. `2.0` counts as an integer, too.
fn integer(value: &Value) -> Option<u64> {
    let whole = |number: &f64| number.fract() == 0.0 && (0.0..=9e15).contains(number);
    value.as_u64().or_else(|| value.as_f64().filter(whole).map(|number| number as u64))
}

impl Rule {
    fn accepts(self, value: &Value) -> bool {
        let integers = |entries: &[Value], most: u64| {
            entries.iter().all(|entry| integer(entry).is_some_and(|entry| entry <= most))
        };
        match (self, value) {
            (Self::Integer { least, most }, value) => {
                integer(value).is_some_and(|number| (least..=most).contains(&number))
            }
            (Self::Number { least, most }, value) => value.as_f64().is_some_and(|number| {
                let enough = match least {
                    Bound::AtLeast(least) => number >= least,
                    Bound::Above(least) => number > least,
                };
                enough && number <= most
            }),
            (Self::Flag, value) => value.is_boolean(),
            (Self::Text, value) => value.is_string(),
            (Self::Choice(choices), Value::String(text)) => choices.contains(&text.as_str()),
            (Self::Integers { entries, most }, Value::Array(values)) => {
                let length = match entries {
                    Entries::Exactly(length) => values.len() == length,
                    Entries::AtMost(length) => values.len() <= length,
                };
                length && integers(values, most)
            }
            (Self::Numbers { most_entries, most }, Value::Array(values)) => {
                let is_within = |value: &Value| value.as_f64().is_some_and(|it| it > 0.0 && it <= most);
                values.len() <= most_entries && values.iter().all(is_within)
            }
            (Self::Texts { most_entries }, Value::Array(values)) => {
                values.len() <= most_entries && values.iter().all(Value::is_string)
            }
            (Self::TokenIds { most_entries }, Value::Array(values)) => {
                values.len() <= most_entries && integers(values, u32::MAX.into())
            }
            (Self::TokenIds { .. }, value) => integers(std::slice::from_ref(value), u32::MAX.into()),
            (Self::Object, value) => value.is_object(),
            (Self::Any, _) => true,
            (Self::Choice(_) | Self::Integers { .. } | Self::Numbers { .. } | Self::Texts { .. }, _) => false,
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Integer { least, most } if least == most => write!(f, "{most}"),
            Self::Integer { least, most } => write!(f, "an integer from {least} to {most}"),
            Self::Number { least: Bound::AtLeast(least), most } => {
                write!(f, "a number from {least} to {most}")
            }
            Self::Number { least: Bound::Above(least), most } => {
                write!(f, "a number above {least} and at most {most}")
            }
            Self::Flag => write!(f, "true or false"),
            Self::Text => write!(f, "a text"),
            Self::Choice([only]) => write!(f, "{only:?}"),
            Self::Choice(choices) => write!(f, "one of {}", choices.join(", ")),
            Self::Integers { entries: Entries::Exactly(length), most } => {
                write!(f, "a list of {length} integers from 0 to {most}")
            }
            Self::Integers { entries: Entries::AtMost(length), most } => {
                write!(f, "a list of at most {length} integers from 0 to {most}")
            }
            Self::Numbers { most_entries, most } => {
                write!(f, "a list of at most {most_entries} numbers above 0 and at most {most}")
            }
            Self::Texts { most_entries } => write!(f, "a list of at most {most_entries} texts"),
            Self::TokenIds { most_entries } => {
                write!(f, "a token id from 0 to {} or a list of at most {most_entries} of them", u32::MAX)
            }
            Self::Object => write!(f, "an object"),
            Self::Any => write!(f, "any value"),
        }
    }
}

/// A type to which the value of a key is converted.
pub(crate) trait FromJson: Sized {
    /// Converts a value that the key's rule accepts.
    fn from_json(value: &Value) -> Option<Self>;
}

impl FromJson for usize {
    fn from_json(value: &Value) -> Option<Self> {
        integer(value).and_then(|number| number.try_into().ok())
    }
}

impl FromJson for u32 {
    fn from_json(value: &Value) -> Option<Self> {
        integer(value).and_then(|number| number.try_into().ok())
    }
}

impl FromJson for f64 {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_f64()
    }
}

impl FromJson for bool {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_bool()
    }
}

impl FromJson for String {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_str().map(Self::from)
    }
}

impl FromJson for Value {
    fn from_json(value: &Value) -> Option<Self> {
        Some(value.clone())
    }
}

impl<T: FromJson> FromJson for Vec<T> {
    fn from_json(value: &Value) -> Option<Self> {
        value.as_array()?.iter().map(T::from_json).collect()
    }
}

impl FromJson for TokenIds {
    fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::Array(_) => Vec::from_json(value).map(Self::Many),
            one => u32::from_json(one).map(Self::One),
        }
    }
}

/// The keys of a file, or of an object in it.
#[derive(Clone, Debug)]
pub(crate) struct Keys<'a> {
    file: &'a ConfigFile,
    /// Prefix of the keys' names in errors: the path of the object and a dot. Empty for top-level keys.
    prefix: String,
    /// The object; `None` if it is missing. All keys then count as missing, too.
    object: Option<&'a Map<String, Value>>,
}

impl<'a> Keys<'a> {
    /// Returns the top-level keys of a file. `object` is the file's top-level object.
    pub(super) fn of(file: &'a ConfigFile, object: &'a Map<String, Value>) -> Self {
        Self { file, prefix: String::new(), object: Some(object) }
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.object?.get(name)
    }

    /// Returns the value of a key; `None` if it is missing or null.
    pub fn get<T: FromJson>(&self, key: &Key<T>) -> Result<Option<T>, LoadError> {
        self.checked(key.name, key.rule)?
            .map(|value| T::from_json(value).ok_or_else(|| self.refusal(key.name, key.rule, value)))
            .transpose()
    }

    /// Returns the value of a key, or `default` if it is missing or null.
    pub fn get_or<T: FromJson>(&self, key: &Key<T>, default: T) -> Result<T, LoadError> {
        Ok(self.get(key)?.unwrap_or(default))
    }

    /// Returns the value of a required key.
    pub fn need<T: FromJson>(&self, key: &Key<T>) -> Result<T, LoadError> {
        self.get(key)?.ok_or_else(|| self.missing(key))
    }

    /// True if the object has the key, even if its value is null.
    pub fn has<T>(&self, key: &Key<T>) -> bool {
        self.value(key.name).is_some()
    }

    /// Returns the keys of the object `name`. If this object is missing or null, all keys of the result count as
    /// missing.
    pub fn section(&self, name: &str) -> Result<Self, LoadError> {
        let object = self.checked(name, Rule::Object)?.and_then(Value::as_object);
        Ok(Self { file: self.file, prefix: format!("{}{name}.", self.prefix), object })
    }

    /// Returns the path of the object in its file.
    pub fn name(&self) -> &str {
        self.prefix.trim_end_matches('.')
    }

    /// True if the object has a key of this name whose value is not null.
    pub fn holds(&self, name: &str) -> bool {
        self.value(name).is_some_and(|value| !value.is_null())
    }

    /// True if the object is missing or null.
    pub fn is_missing(&self) -> bool {
        self.object.is_none()
    }

    /// True if the object is missing or has no keys.
    pub fn is_empty(&self) -> bool {
        self.object.is_none_or(Map::is_empty)
    }

    /// Returns the names of the keys whose values are objects.
    pub fn objects(&self) -> Vec<&'a str> {
        let of_object = |(name, value): (&'a String, &Value)| value.is_object().then_some(name.as_str());
        self.object.into_iter().flatten().filter_map(of_object).collect()
    }

    /// Returns the error that a key is missing.
    pub fn missing<T>(&self, key: &Key<T>) -> LoadError {
        self.invalid(key, "is missing")
    }

    /// Returns an error about the file. The caller names the keys at fault in `problem`.
    pub fn in_file(&self, problem: String) -> LoadError {
        self.file.invalid(problem)
    }

    /// Refuses a flag that is true.
    pub fn refuse(&self, key: &Key<bool>) -> Result<(), LoadError> {
        match self.get(key)? {
            Some(true) => Err(self.invalid(key, "true is not supported")),
            _ => Ok(()),
        }
    }

    /// Returns an error about a key.
    pub fn invalid<T>(&self, key: &Key<T>, problem: impl fmt::Display) -> LoadError {
        self.file.invalid(format!("{}{}: {problem}", self.prefix, key.name))
    }

    /// Returns the value of a key; `None` if the key is missing or null. Refuses a value that breaks the rule.
    fn checked(&self, name: &str, rule: Rule) -> Result<Option<&'a Value>, LoadError> {
        #[cfg(test)]
        self.file.note(format!("{}{name}", self.prefix), rule);
        match self.value(name).filter(|value| !value.is_null()) {
            Some(value) if !rule.accepts(value) => Err(self.refusal(name, rule, value)),
            value => Ok(value),
        }
    }

    fn refusal(&self, name: &str, rule: Rule, value: &Value) -> LoadError {
        let mut shown = value.to_string();
        if let Some((end, _)) = shown.char_indices().nth(SHOWN) {
            shown.truncate(end);
            shown.push('…');
        }
        self.file.invalid(format!("{}{name}: must be {rule}, not {shown}", self.prefix))
    }
}
