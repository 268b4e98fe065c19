//! The error of a constraint that is refused, or of a matcher that failed.

use std::fmt;

/// Maximum length of a message in bytes. Messages of the library quote the grammar and list tokens.
const MAX_MESSAGE: usize = 200;

/// The beginning of the library's message about a panic that it has caught.
const PANIC: &str = "panic: ";
/// The message where a grammar has no token that continues the text.
pub(crate) const NO_TOKEN: &str = "no token can follow";
/// The message of work that its time limit has stopped.
pub(crate) const TOO_LONG: &str = "takes too long";
/// The message of a compilation that was not done in time.
pub(crate) const TOO_LONG_TO_COMPILE: &str = "takes too long to compile";

/// An error of a constraint: its position in the constraint, and what is wrong there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConstraintError {
    /// The position, such as `schema.properties.a.items`. It is empty if the error has no position.
    pub path: String,
    /// The fault, in one short sentence.
    pub message: String,
    /// The cause of the error.
    pub cause: Cause,
}

/// The cause of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The constraint: a limit that it exceeds, or a part that cannot be enforced.
    Constraint,
    /// This process: a panic, a thread that cannot be started, or a constraint that was checked and does not compile.
    Process,
}

impl ConstraintError {
    /// An error at a position.
    pub(crate) fn at(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), cause: Cause::Constraint }
    }

    /// An error that the constraint does not cause.
    pub(crate) fn of_process(message: impl Into<String>) -> Self {
        Self { cause: Cause::Process, ..Self::at("", message) }
    }

    /// An error of the library, without the parts that quote its state.
    pub(crate) fn of_library(path: impl Into<String>, error: impl fmt::Display) -> Self {
        // With the causes, where the error has some.
        let error = format!("{error:#}");
        let cause = if error.starts_with(PANIC) { Cause::Process } else { Cause::Constraint };
        Self { cause, ..Self::at(path, shorten(&error)) }
    }

    /// True if a time limit caused the error. The same constraint may pass on a machine with less other work.
    pub fn is_of_time(&self) -> bool {
        [TOO_LONG, TOO_LONG_TO_COMPILE].contains(&self.message.as_str())
    }
}

impl fmt::Display for ConstraintError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => f.write_str(&self.message),
            path => write!(f, "{path}: {}", self.message),
        }
    }
}

impl std::error::Error for ConstraintError {}

/// The first line of a library's error, in lower case and of bounded length.
///
/// Lists of tokens stand behind a colon in the errors of unknown special tokens; they are cut.
fn shorten(error: &str) -> String {
    let line = error.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("not accepted");
    let line = match line {
        "NoExtensionBias" => NO_TOKEN,
        "Cancelled" | "operation cancelled" => TOO_LONG,
        _ if line.starts_with("oneOf constraints are not supported") => {
            "oneOf cannot be enforced, since its alternatives may overlap"
        }
        _ if line.starts_with("lexer precomputation failed") => "is too complex to compile",
        _ if line.starts_with(PANIC) => "cannot be compiled",
        _ => line,
    };
    let line = line.split("; following special tokens").next().unwrap_or(line);
    let line = line.split("; known tokens").next().unwrap_or(line);
    let mut chars = line.chars();
    let first = chars.next().map(char::to_lowercase).into_iter().flatten();
    let mut text: String = first.chain(chars).filter(|c| !c.is_control()).collect();
    if text.len() > MAX_MESSAGE {
        text.truncate(text.floor_char_boundary(MAX_MESSAGE));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests;
