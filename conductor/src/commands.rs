//! `conductor status`, `conductor drain` and `conductor trace`: commands for operators that call a running conductor.
//!
//! The commands connect to the listener of routers and operators, with the same secret and certificate as a router. A
//! command that is given no address takes the only conductor of its user on this machine.

mod call;
mod drain;
mod status;
mod table;
mod trace;

use std::{ffi::OsString, io::Write, iter, process::ExitCode};

use serde::{Serialize, de::DeserializeOwned};
use tutti_runtime::{
    Error,
    command_line::{Process, processes},
    config, exit,
};
use tutti_settings::{CallSettings, CommandSettings};

use self::call::Calls;
use crate::running::Note;

/// A command that calls a running conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Prints the workers and the queue.
    Status,
    /// Drains a worker or the conductor.
    Drain,
    /// Prints the phases of one request.
    Trace,
}

impl Command {
    /// The command of this name; `None` if there is no such command.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "status" => Some(Self::Status),
            "drain" => Some(Self::Drain),
            "trace" => Some(Self::Trace),
            _ => None,
        }
    }

    /// `main` of the command. `arguments` are the arguments after the command's name. The exit code is 0, 1 if the
    /// command failed, or 2 if its arguments are wrong.
    pub fn run(self, arguments: impl Iterator<Item = OsString>) -> ExitCode {
        match self {
            Self::Status => run(processes::STATUS, arguments, status::run),
            Self::Drain => run(processes::DRAIN, arguments, drain::run),
            Self::Trace => run(processes::TRACE, arguments, trace::run),
        }
    }
}

fn run<S>(
    process: Process,
    arguments: impl Iterator<Item = OsString>,
    act: impl AsyncFnOnce(Calls, S) -> Result<String, Error>,
) -> ExitCode
where
    S: CommandSettings + Serialize + DeserializeOwned,
{
    let read = || {
        let mut settings: S =
            config::load_command(process, iter::once(process.name.into()).chain(arguments))?;
        settings.validate()?;
        if settings.call().conductor.is_none() {
            find(settings.call_mut())?;
        }
        Ok(settings)
    };
    exit::command(process.name, read, |settings| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::internal(format!("cannot start a runtime: {e}")))?;
        let text = runtime.block_on(async {
            let calls = Calls::connect(settings.call(), settings.cluster_tls()).await?;
            act(calls, settings).await
        })?;
        std::io::stdout()
            .write_all(text.as_bytes())
            .map_err(|e| Error::internal(format!("cannot print: {e}")))
    })
}

/// Finds the conductor of a command that names none.
fn find(call: &mut CallSettings) -> Result<(), Error> {
    let note = Note::only(Note::all())?;
    call.conductor = Some(note.cluster);
    if call.cluster_token_file.is_none() {
        call.cluster_token_file = note.cluster_token_file;
    }
    Ok(())
}
