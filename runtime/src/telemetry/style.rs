//! The style of all lines on stderr: their format, and the name of their process. Lines that are written before
//! logging is set up, or after its end, have it, too.

use std::{env, ffi::OsString, fmt, io::IsTerminal, sync::OnceLock};

use serde_json::{Map, Value};
use tracing::Level;
use tracing_subscriber::fmt::{
    format::Writer,
    time::{FormatTime, SystemTime},
};
use tutti_settings::LogFormat;

/// The name of a process in its log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogName {
    /// The executable, such as `worker`.
    pub process: &'static str,
    /// The rank of a worker.
    pub rank: Option<u32>,
}

impl LogName {
    /// The name of a process without a rank.
    pub const fn of(process: &'static str) -> Self {
        Self { process, rank: None }
    }

    /// The begin of a line in JSON: time, level and process.
    pub(super) fn line(self, level: Level) -> Result<Map<String, Value>, fmt::Error> {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let mut line = Map::new();
        line.insert("timestamp".into(), time.into());
        line.insert("level".into(), level.as_str().into());
        line.insert("process".into(), self.process.into());
        if let Some(rank) = self.rank {
            line.insert("rank".into(), rank.into());
        }
        Ok(line)
    }
}

impl fmt::Display for LogName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            None => f.write_str(self.process),
            Some(rank) => write!(f, "{} {rank}", self.process),
        }
    }
}

static STYLE: OnceLock<(LogFormat, LogName)> = OnceLock::new();

/// Sets the style of this process's lines, once its settings are known. Later calls have no effect.
pub fn set_style(format: LogFormat, name: LogName) {
    let _ = STYLE.set((format, name));
}

/// The format of this process's lines.
pub(crate) fn format() -> LogFormat {
    STYLE
        .get()
        .map_or_else(|| presumed(env::args_os(), env::var_os("TUTTI_LOG_FORMAT")), |(format, _)| *format)
}

/// True if stderr is a terminal and the log format is text. Output other than log lines, such as progress bars, is then
/// allowed.
pub(crate) fn is_for_people() -> bool {
    std::io::stderr().is_terminal() && format() == LogFormat::Text
}

/// The format of a process that has not read its settings, or cannot read them. Its command line and its environment
/// still say the format.
fn presumed(arguments: impl Iterator<Item = OsString>, variable: Option<OsString>) -> LogFormat {
    let json = LogFormat::Json.name();
    let (mut found, mut is_next) = (variable.is_some_and(|value| value == json), false);
    for argument in arguments {
        if std::mem::take(&mut is_next) {
            found = argument == json;
        }
        is_next = argument == "--log-format";
        if let Some(value) = argument.to_str().and_then(|text| text.strip_prefix("--log-format=")) {
            found = value == json;
        }
    }
    if found { LogFormat::Json } else { LogFormat::Text }
}

/// The last line of the process `name`, which ends with this error.
pub(crate) fn last_line(name: &str, error: &str) -> String {
    let text = || format!("{name}: {error}");
    if format() == LogFormat::Text {
        return text();
    }
    let known = STYLE.get().map(|(_, name)| *name);
    let line = known.unwrap_or(LogName::of("")).line(Level::ERROR).and_then(|mut line| {
        if known.is_none() {
            line.insert("process".into(), name.into());
        }
        line.insert("message".into(), error.trim_end().into());
        serde_json::to_string(&line).map_err(|_| fmt::Error)
    });
    line.unwrap_or_else(|_| text())
}

#[cfg(test)]
mod tests;
