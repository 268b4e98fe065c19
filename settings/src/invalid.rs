//! The error of a refused setting.

use std::fmt;

/// The key of a refused setting, and the reason for the refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The setting's key. The keys of some tables have the table's name before them, as in `sim.fail_every`.
    pub field: String,
    /// The value and the limit, in words that follow the key, such as "is 0, but must be at least 1".
    pub message: String,
}

impl Invalid {
    /// Creates the refusal of the setting `field`.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into() }
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

impl std::error::Error for Invalid {}
