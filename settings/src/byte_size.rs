//! Sizes in bytes in the forms that users write: `512MiB`, `2GB`, `1073741824`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    Kind,
    value::{self, Value, Written},
};

/// A number of bytes. It is read with or without a unit. It is printed in the first of the `UNITS` that divides the
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Units in order of preference: a number is printed in the first unit that divides it.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("B", 1),
];

impl ByteSize {
    /// The number of bytes, or the largest that this machine can address.
    pub fn bytes(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim();
        let factor = match unit {
            "" => Some(1),
            _ => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, factor)| *factor),
        };
        let number: Option<u64> = number.parse().ok();
        number
            .zip(factor)
            .and_then(|(number, factor)| number.checked_mul(factor))
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a size like 512MiB, 2GB or 1073741824"))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|(_, factor)| self.0 > 0 && self.0.is_multiple_of(*factor)) {
            Some((unit, factor)) => write!(f, "{}{unit}", self.0 / factor),
            None => write!(f, "0"),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Written::deserialize(deserializer)?.text().parse().map_err(de::Error::custom)
    }
}

impl Value for ByteSize {
    const KIND: Kind = Kind::Parsed(value::parse::<Self>);

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}

#[cfg(test)]
mod tests;
