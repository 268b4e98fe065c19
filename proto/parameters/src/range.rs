//! Ranges of values, limits on the length of lists, and the refusal of a value outside of its range.

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
    /// Creates the refusal of a value of this parameter.
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
    /// The range of the parameter's values.
    pub range: R,
}

/// A range of numbers. `high` is included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// The lower bound.
    pub low: f32,
    /// True if `low` itself is not in the range.
    pub excludes_low: bool,
    /// The largest number.
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
    /// Returns the number if it is in the range, else refuses it.
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
    /// The smallest integer.
    pub low: i64,
    /// The largest integer.
    pub high: i64,
}

impl Integers {
    /// The integers of a `u32`. Once parsed, they need no check.
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
    /// Returns the integer if it is in the range, else refuses it.
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
    /// Plural name of the items, for refusals.
    pub items: &'static str,
}

impl Bounded<Count> {
    /// Refuses a list with too many items.
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
