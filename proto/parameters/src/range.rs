//! Ranges of values and limits of lists, and the refusal of what is outside of them.

use std::fmt;

/// The refusal of a parameter's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The parameter's name.
    pub parameter: &'static str,
    /// The value and the limit, in words that follow the name, such as "is 9, but must be from -8 to 8".
    pub message: String,
}

impl Refused {
    /// Refuses a value of this parameter.
    pub fn new(parameter: &'static str, message: impl Into<String>) -> Self {
        Self { parameter, message: message.into() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.parameter, self.message)
    }
}

impl std::error::Error for Refused {}

/// A parameter's name and the range of its values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounded<R> {
    /// The parameter's name.
    pub name: &'static str,
    /// The values that it may have.
    pub range: R,
}

/// A range of numbers. It ends with its greatest number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// The end below.
    pub low: f32,
    /// True if `low` itself is outside of the range.
    pub excludes_low: bool,
    /// The greatest number.
    pub high: f32,
}

impl Numbers {
    /// The numbers from `low` to `high`.
    pub const fn new(low: f32, high: f32) -> Self {
        Self { low, excludes_low: false, high }
    }

    /// The numbers above `low`, up to `high`.
    pub const fn above(low: f32, high: f32) -> Self {
        Self { low, excludes_low: true, high }
    }

    /// True if a number is in the range. NaN is in no range.
    pub fn contains(&self, value: f32) -> bool {
        let is_above = if self.excludes_low { value > self.low } else { value >= self.low };
        is_above && value <= self.high
    }
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.excludes_low {
            true => write!(f, "above {} and at most {}", self.low, self.high),
            false => write!(f, "from {} to {}", self.low, self.high),
        }
    }
}

impl Bounded<Numbers> {
    /// Returns a number that is in the range.
    pub fn check(&self, value: f32) -> Result<f32, Refused> {
        if self.range.contains(value) {
            return Ok(value);
        }
        Err(Refused::new(self.name, format!("is {value}, but must be {}", self.range)))
    }
}

/// A range of integers, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Integers {
    /// The least integer.
    pub low: i64,
    /// The greatest integer.
    pub high: i64,
}

impl Integers {
    /// The integers of `u32`, which need no check once they are parsed.
    pub const UNSIGNED: Self = Self { low: 0, high: u32::MAX as i64 };

    /// The integers from `low` to `high`.
    pub const fn new(low: i64, high: i64) -> Self {
        Self { low, high }
    }
}

impl fmt::Display for Integers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "from {} to {}", self.low, self.high)
    }
}

impl Bounded<Integers> {
    /// Returns an integer that is in the range.
    pub fn check<I: Into<i64> + Copy>(&self, value: I) -> Result<I, Refused> {
        let Integers { low, high } = self.range;
        let asked: i64 = value.into();
        if (low..=high).contains(&asked) {
            return Ok(value);
        }
        Err(Refused::new(self.name, format!("is {asked}, but must be {}", self.range)))
    }
}

/// The limit of a list's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Maximum number of items.
    pub most: usize,
    /// The items, in the plural.
    pub items: &'static str,
}

impl Bounded<Count> {
    /// Refuses a list of more items than it may have.
    pub fn check(&self, count: usize) -> Result<(), Refused> {
        let Count { most, items } = self.range;
        if count <= most {
            return Ok(());
        }
        Err(Refused::new(self.name, format!("has {count} {items}, but may have at most {most}")))
    }
}

/// Refuses a token id that is not in the vocabulary.
pub fn check_token_ids(
    parameter: &'static str,
    ids: impl IntoIterator<Item = u32>,
    vocab_size: u32,
) -> Result<(), Refused> {
    match ids.into_iter().find(|&id| id >= vocab_size) {
        Some(id) => {
            let message =
                format!("token id {id} is out of range: the vocabulary has {vocab_size} ids, counted from 0");
            Err(Refused::new(parameter, message))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
