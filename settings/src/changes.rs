//! The differences between the settings in force and the settings that were read again.

use std::fmt;

use crate::value::Value;

/// Settings that differ, grouped by whether a running process can apply their new values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Settings whose new values take effect at once.
    pub live: Vec<Change>,
    /// Names of settings whose new values need a restart.
    pub restart: Vec<String>,
}

/// The old and the new value of one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The key, with the name of its table before it, as in `router.max_queued_tokens`.
    pub name: String,
    /// The old value as a user would write it. `None` if it was not set.
    pub old: Option<String>,
    /// The new value as a user would write it. `None` if it is not set.
    pub new: Option<String>,
}

impl Changes {
    /// Notes a new value that takes effect at once.
    pub(crate) fn live<T: Value>(&mut self, table: Option<&str>, key: &str, old: &T, new: &T) {
        let (old, new) = (old.written(), new.written());
        self.live.push(Change { name: qualified(table, key), old, new });
    }

    /// Notes a new value that needs a restart.
    pub(crate) fn needs_restart(&mut self, table: Option<&str>, key: &str) {
        self.restart.push(qualified(table, key));
    }
}

fn qualified(table: Option<&str>, key: &str) -> String {
    table.map_or_else(|| key.to_owned(), |table| format!("{table}.{key}"))
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let written = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".into());
        write!(f, "{} {} -> {}", self.name, written(&self.old), written(&self.new))
    }
}

#[cfg(test)]
mod tests;
