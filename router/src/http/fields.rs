//! Reads a JSON object member by member. Every error names the member, and unknown members are refused.

use std::{borrow::Cow, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Value, value::RawValue};
use tutti_proto::parameters::{self, Scope, Standing};
use tutti_runtime::Error;

/// Maximum number of members of an object. It is above the number of known parameters, and bounds the work per request.
const MAX_MEMBERS: usize = 256;

/// Error message for a member that is not a declared parameter.
const UNKNOWN: &str = "is not a parameter of this route";

/// Maximum size in bytes of a value that is compared with the harmless values; see [`Fields::refuse`].
const MAX_HARMLESS_BYTES: usize = 256;

/// The members of an object that have not been taken yet. A member whose value is `null` counts as absent, as in
/// OpenAI's clients.
pub struct Fields<'a> {
    /// Path of the object in the request, such as `messages[0].`; empty for the request itself.
    path: String,
    members: Vec<(Cow<'a, str>, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Reads the whole body of a route, which must be a JSON object. Refuses parameters that the route does not have,
    /// and parameters that Tutti does not support. Removes ignored parameters.
    pub fn of_body(body: &'a [u8], route: Scope) -> Result<Self, Error> {
        Self::read(body)?.declared(route)
    }

    fn read(body: &'a [u8]) -> Result<Self, Error> {
        let text = std::str::from_utf8(body).map_err(|e| {
            invalid_body(format!("the body is not UTF-8: byte {} is in no character", e.valid_up_to()))
        })?;
        if text.trim_start().is_empty() {
            return Err(invalid_body("the body is empty, but must be a JSON object"));
        }
        let members = serde_json::from_str::<Members<'_>>(text).map_err(|e| {
            let error = invalid_body(format!("the body is not a JSON object: {e}"));
            match member_at(text, &e) {
                Some(name) => error.with_field(name),
                None => error,
            }
        })?;
        Self::checked(String::new(), members)
    }

    /// Reads the object at `path` in the request. Checks its members as [`Fields::of_body`] does.
    pub fn of_object(path: &str, value: &'a RawValue, scope: Scope) -> Result<Self, Error> {
        Self::of_value(path, value)?.declared(scope)
    }

    /// Reads the object at `path` in the request. The names of its members are not checked.
    pub fn of_value(path: &str, value: &'a RawValue) -> Result<Self, Error> {
        let members = parse::<Members<'_>>(path, value)?;
        Self::checked(format!("{path}."), members)
    }

    fn checked(path: String, members: Members<'a>) -> Result<Self, Error> {
        let members = members.0;
        for (i, (name, _)) in members.iter().enumerate() {
            if members[..i].iter().any(|(earlier, _)| earlier == name) {
                return Err(Error::invalid(format!("{path}{name}"), "is given twice"));
            }
        }
        Ok(Self { path, members })
    }

    /// Refuses undeclared and unsupported members, and removes ignored members.
    fn declared(mut self, scope: Scope) -> Result<Self, Error> {
        let is_declared = |name: &str| parameters::at(scope).any(|parameter| parameter.name == name);
        if let Some((name, _)) = self.members.iter().find(|(name, _)| !is_declared(name)) {
            return Err(Error::invalid(self.name(name), UNKNOWN));
        }
        for parameter in parameters::at(scope) {
            match parameter.standing {
                Standing::Refused { why, harmless } => self.refuse(parameter.name, harmless, why)?,
                Standing::Ignored => {
                    self.take_raw(parameter.name);
                }
                Standing::Honoured | Standing::RefusedUnless(_) => {}
            }
        }
        Ok(self)
    }

    /// The full path of a member.
    pub fn name(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Takes a member without parsing it.
    pub fn take_raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let index = self.members.iter().position(|(given, _)| given == name)?;
        let (_, value) = self.members.swap_remove(index);
        (value.get() != "null").then_some(value)
    }

    /// Takes a member and parses it as `T`.
    pub fn take<T: Deserialize<'a>>(&mut self, name: &str) -> Result<Option<T>, Error> {
        self.take_raw(name).map(|value| parse(&self.name(name), value)).transpose()
    }

    /// Takes a member that is a list of at most `max` items; see [`list`].
    pub fn take_list<T: Deserialize<'a>>(&mut self, name: &str, max: usize) -> Result<Option<Vec<T>>, Error> {
        self.take_raw(name).map(|value| list(&self.name(name), value, max)).transpose()
    }

    /// Takes a member and parses it as `T`; the default of `T` if the member is absent.
    pub fn take_or_default<T: Deserialize<'a> + Default>(&mut self, name: &str) -> Result<T, Error> {
        Ok(self.take(name)?.unwrap_or_default())
    }

    /// Takes a member and parses it as `T`; an error if the member is absent.
    pub fn require<T: Deserialize<'a>>(&mut self, name: &str) -> Result<T, Error> {
        let full = self.name(name);
        self.take(name)?.ok_or_else(|| Error::invalid(full, "is required"))
    }

    /// Refuses a known member that Tutti does not support, unless its value is in `harmless`, the JSON of values that
    /// have no effect.
    fn refuse(&mut self, name: &str, harmless: &[&str], why: &str) -> Result<(), Error> {
        let full = self.name(name);
        let Some(value) = self.take_raw(name) else { return Ok(()) };
        if value.get().len() <= MAX_HARMLESS_BYTES {
            let given: Value = parse(&full, value)?;
            if harmless.iter().any(|json| serde_json::from_str(json).is_ok_and(|value: Value| value == given))
            {
                return Ok(());
            }
        }
        Err(Error::invalid(full, format!("is not supported: {why}")))
    }

    /// Refuses the members that have not been taken.
    pub fn finish(self) -> Result<(), Error> {
        match self.members.first() {
            Some((name, _)) => Err(Error::invalid(self.name(name), UNKNOWN)),
            None => Ok(()),
        }
    }
}

/// Parses a value. The error names the member and the expected type.
pub fn parse<'a, T: Deserialize<'a>>(name: &str, value: &'a RawValue) -> Result<T, Error> {
    serde_json::from_str(value.get()).map_err(|e| located(name, &e))
}

fn located(name: &str, error: &serde_json::Error) -> Error {
    let message = error.to_string();
    // The position in the message is relative to the value and not to the body. It would mislead the client, so it is
    // cut off.
    let message = message.rfind(" at line ").map_or(message.as_str(), |end| &message[..end]);
    Error::invalid(name, message)
}

/// Parses a list of at most `max` items. Parsing stops at the first item beyond the limit, so that further items take
/// no memory.
pub fn list<'a, T: Deserialize<'a>>(name: &str, value: &'a RawValue, max: usize) -> Result<Vec<T>, Error> {
    let mut deserializer = serde_json::Deserializer::from_str(value.get());
    FewItems::<T> { max, items: PhantomData }.deserialize(&mut deserializer).map_err(|e| located(name, &e))
}

struct FewItems<T> {
    max: usize,
    items: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for FewItems<T> {
    type Value = Vec<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for FewItems<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            if items.len() == self.max {
                return Err(de::Error::custom(format!("has more than {} items", self.max)));
            }
            items.push(item);
        }
        Ok(items)
    }
}

fn invalid_body(message: impl Into<String>) -> Error {
    Error::new(tutti_runtime::ErrorKind::InvalidArgument, message)
}

/// Returns the name of the member whose value is not a valid JSON number, such as Python's NaN. Such a value comes from
/// a client's arithmetic, and the name helps more than a byte position.
fn member_at<'t>(text: &'t str, error: &serde_json::Error) -> Option<&'t str> {
    let line_start =
        text.split_inclusive('\n').take(error.line().checked_sub(1)?).map(str::len).sum::<usize>();
    let near = line_start + error.column();
    let (head, _) = text.split_at_checked(near.min(text.len()))?;
    let (before, value) = head.rsplit_once(':')?;
    let numeric = ["N", "I", "-"].iter().any(|start| value.trim_start().starts_with(start))
        || (error.to_string().starts_with("number out of range"));
    let quoted = before.trim_end().strip_suffix('"')?;
    let (_, name) = quoted.rsplit_once('"')?;
    numeric.then_some(name)
}

struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
        let mut members = Vec::new();
        while let Some((name, value)) = map.next_entry::<Name<'de>, &'de RawValue>()? {
            if members.len() == MAX_MEMBERS {
                return Err(de::Error::custom(format!("has more than {MAX_MEMBERS} members")));
            }
            members.push((name.0, value));
        }
        Ok(Members(members))
    }
}

/// A member's name, borrowed if it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests;
