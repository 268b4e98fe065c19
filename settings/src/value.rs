//! The types that a setting may have.

use std::{net::SocketAddr, path::PathBuf, str::FromStr};

use serde::{
    Deserialize,
    de::{Error, MapAccess},
};

use crate::{Kind, socket_address};

/// A type that a setting may have.
pub trait Value: for<'de> Deserialize<'de> {
    /// The kind of value that a user writes.
    const KIND: Kind;

    /// Reads the next value of `map`.
    fn read<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Self, A::Error> {
        map.next_value()
    }

    /// Reads the next value of `map`, which may be absent.
    fn read_option<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Option<Self>, A::Error> {
        map.next_value()
    }

    /// The value as a user would write it. None if the value is absent. Also None for types, such as switches, of which
    /// `--help` shows no default.
    fn written(&self) -> Option<String> {
        None
    }

    /// The value as a number, which is checked against the setting's range. None if the value is no number.
    fn number(&self) -> Option<u64> {
        None
    }
}

impl Value for u32 {
    const KIND: Kind = Kind::Number;

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn number(&self) -> Option<u64> {
        Some(u64::from(*self))
    }
}

impl Value for u64 {
    const KIND: Kind = Kind::Number;

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn number(&self) -> Option<u64> {
        Some(*self)
    }
}

impl Value for usize {
    const KIND: Kind = Kind::Number;

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }

    fn number(&self) -> Option<u64> {
        Some(*self as u64)
    }
}

impl Value for bool {
    const KIND: Kind = Kind::Switch;
}

impl Value for String {
    const KIND: Kind = Kind::Text;

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}

/// A value that a file may give as a text or as a whole number, such as a port or a size.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text or a whole number")]
pub(crate) enum Written {
    Number(u64),
    Text(String),
}

impl Written {
    /// The value as a text.
    pub fn text(&self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text.clone(),
        }
    }
}

impl Value for PathBuf {
    const KIND: Kind = Kind::Path;
}

impl Value for SocketAddr {
    const KIND: Kind = Kind::Parsed(|text| socket_address::parse(text).map(drop));

    fn read<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Self, A::Error> {
        let written: Written = map.next_value()?;
        socket_address::parse(&written.text()).map_err(A::Error::custom)
    }

    fn read_option<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Option<Self>, A::Error> {
        let written: Option<Written> = map.next_value()?;
        written.map(|written| socket_address::parse(&written.text())).transpose().map_err(A::Error::custom)
    }

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}

/// A list of texts. It is read from a list, or from one text with commas between the parts, as in an environment
/// variable.
impl Value for Vec<String> {
    const KIND: Kind = Kind::List;

    fn read<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Self, A::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a text or a list of texts")]
        enum Urls {
            Text(String),
            List(Vec<String>),
        }
        Ok(match map.next_value()? {
            Urls::Text(text) => text.split(',').map(|part| part.trim().to_owned()).collect(),
            Urls::List(list) => list,
        })
    }
}

impl<T: Value> Value for Option<T> {
    const KIND: Kind = T::KIND;

    fn read<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Self, A::Error> {
        T::read_option(map)
    }

    fn written(&self) -> Option<String> {
        self.as_ref().and_then(T::written)
    }

    fn number(&self) -> Option<u64> {
        self.as_ref().and_then(T::number)
    }
}

/// Checks that `text` parses as a `T`.
pub fn parse<T: FromStr<Err: ToString>>(text: &str) -> Result<(), String> {
    text.parse::<T>().map(drop).map_err(|error| error.to_string())
}
