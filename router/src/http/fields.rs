//! A JSON object's members, taken one by one: every error names the member, and members nobody takes are refused.

use std::{borrow::Cow, fmt};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor},
};
use serde_json::{Value, value::RawValue};
use tutti_runtime::Error;

/// More members than any request has; bounds the work done for one that is nothing but members.
const MAX_MEMBERS: usize = 256;

/// A longer value asks for something.
const MAX_HARMLESS_BYTES: usize = 256;

/// The members of one object that have not been taken yet. `null` counts as absent, as in OpenAI's clients.
pub struct Fields<'a> {
    /// Where the object is in the request: empty for the request itself, else such as `messages[0].`.
    path: String,
    members: Vec<(Cow<'a, str>, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Reads a whole body, which must be a JSON object.
    pub fn of_body(body: &'a [u8]) -> Result<Self, Error> {
        let text = std::str::from_utf8(body).map_err(|e| {
            invalid_body(format!("the body is not UTF-8: byte {} is part of no character", e.valid_up_to()))
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

    /// Reads an object inside of the request; `path` is where it is.
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

    /// The full name of a member.
    pub fn name(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Takes a member unread.
    pub fn take_raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let index = self.members.iter().position(|(given, _)| given == name)?;
        let (_, value) = self.members.swap_remove(index);
        (value.get() != "null").then_some(value)
    }

    /// Takes a member of this type.
    pub fn take<T: Deserialize<'a>>(&mut self, name: &str) -> Result<Option<T>, Error> {
        self.take_raw(name).map(|value| parse(&self.name(name), value)).transpose()
    }

    /// Takes a member of this type, or its default.
    pub fn take_or_default<T: Deserialize<'a> + Default>(&mut self, name: &str) -> Result<T, Error> {
        Ok(self.take(name)?.unwrap_or_default())
    }

    /// Takes a member that must be there.
    pub fn require<T: Deserialize<'a>>(&mut self, name: &str) -> Result<T, Error> {
        let full = self.name(name);
        self.take(name)?.ok_or_else(|| Error::invalid(full, "is required"))
    }

    /// Refuses a known member that asks for something Tutti does not do; values that ask for nothing are `harmless`.
    pub fn refuse(&mut self, name: &str, harmless: &[Value], why: &str) -> Result<(), Error> {
        let full = self.name(name);
        let Some(value) = self.take_raw(name) else { return Ok(()) };
        if value.get().len() <= MAX_HARMLESS_BYTES && harmless.contains(&parse(&full, value)?) {
            return Ok(());
        }
        Err(Error::invalid(full, format!("is not supported: {why}")))
    }

    /// Takes members that change nothing about the answer.
    pub fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.take_raw(name);
        }
    }

    /// Refuses what has not been taken, by name.
    pub fn finish(self) -> Result<(), Error> {
        match self.members.first() {
            Some((name, _)) => Err(Error::invalid(self.name(name), "is not a parameter of this route")),
            None => Ok(()),
        }
    }
}

/// Reads a value; an error names the member and what was expected.
pub fn parse<'a, T: Deserialize<'a>>(name: &str, value: &'a RawValue) -> Result<T, Error> {
    serde_json::from_str(value.get()).map_err(|e| {
        let message = e.to_string();
        // The position is one within the value, which nobody can look up.
        let message = message.rfind(" at line ").map_or(message.as_str(), |end| &message[..end]);
        Error::invalid(name, message)
    })
}

fn invalid_body(message: impl Into<String>) -> Error {
    Error::new(tutti_runtime::ErrorKind::InvalidArgument, message)
}

/// The member whose value is no JSON number, such as Python's NaN: those come from clients' arithmetic, and a byte
/// position alone would not help them.
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

/// A member's name, borrowed where it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests;
