//! Reasons why no load could be sent.

use std::path::PathBuf;

/// A reason why a run does not start, or ends before all of its load was sent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag whose value cannot be used.
    #[error("{flag}: {why}")]
    Argument {
        /// The flag, with its dashes.
        flag: &'static str,
        /// The problem, with the value.
        why: String,
    },
    /// A line of a workload file that is not a request.
    #[error("{} line {line}: {field}: {why}", file.display())]
    Line {
        /// The workload file.
        file: PathBuf,
        /// Number of the line, counted from 1.
        line: usize,
        /// The field at fault, or `line` if the line is not an object.
        field: String,
        /// The problem, with the value.
        why: String,
    },
    /// A file that cannot be read or written.
    #[error("{}: {error}", file.display())]
    File {
        /// Path of the file.
        file: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A server that does not list its models.
    #[error("{url}: {why}")]
    Server {
        /// The URL that was asked.
        url: String,
        /// The server's answer, or the reason why there is none.
        why: String,
    },
    /// A fault of the generator itself.
    #[error("internal fault: {0}")]
    Internal(String),
}

impl Error {
    pub(crate) fn argument(flag: &'static str, why: impl Into<String>) -> Self {
        Self::Argument { flag, why: why.into() }
    }

    pub(crate) fn file(file: impl Into<PathBuf>, error: std::io::Error) -> Self {
        Self::File { file: file.into(), error }
    }

    /// True if the fault is in the command line or in a file that it names, and not in the server.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Argument { .. } | Self::Line { .. } | Self::File { .. })
    }
}
