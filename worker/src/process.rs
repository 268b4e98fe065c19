//! The worker as a process: spawned by a conductor, or started by hand.

use std::{ffi::OsString, process::ExitCode};

use tutti_proto::Rank;
use tutti_runtime::{Error, ErrorKind, exit, shutdown::Shutdown, telemetry::Telemetry};

use crate::{
    config::{WorkerConfig, WorkerFlags},
    join::{self, Joining},
    lifeline::Lifeline,
};

const NAME: &str = "worker";

/// `main` of a worker that a conductor has spawned. Its settings come from the conductor alone: by the command line,
/// the lifeline at stdin, and the Welcome. Environment variables are the conductor's and are ignored.
pub fn spawned(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let flags: WorkerFlags = exit::flags(arguments);
    let ended = Lifeline::take().and_then(|lifeline| {
        let (conductor, rank) = address(flags.conductor, flags.rank)?;
        let joining = Joining { conductor, rank, join_token: lifeline.join_token };
        run(&lifeline.telemetry, async |shutdown| join_once(&joining, shutdown).await)
    });
    match ended {
        Ok(Err(error)) if conductor_knows(&error) => ExitCode::from(exit::code(&error)),
        ended => exit::run(NAME, || ended?),
    }
}

/// True if the conductor reports this error, once for all workers: it went through the stream.
fn conductor_knows(error: &Error) -> bool {
    error.kind() == ErrorKind::Unavailable || exit::code(error) == exit::USAGE
}

/// `main` of a worker that joins by hand. If its conductor goes away, it waits for the next one at the same address.
pub fn by_hand(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let flags: WorkerFlags = exit::flags(arguments);
    exit::run(NAME, || {
        let config = WorkerConfig::load(&flags)?;
        let (conductor, rank) = address(config.conductor.clone(), config.rank)?;
        let joining = Joining { conductor, rank, join_token: config.join_token()? };
        run(&config.telemetry(), async |shutdown| {
            loop {
                match join_once(&joining, shutdown).await? {
                    Err(error) if error.kind() == ErrorKind::Unavailable && !shutdown.is_draining() => {
                        tracing::warn!(%error, "waiting for a conductor");
                    }
                    outcome => return Ok(outcome),
                }
            }
        })?
    })
}

/// Joins and serves once. The outer error comes from joining, the inner one from serving. A worker that is told to shut
/// down while it joins ends without an error.
async fn join_once(joining: &Joining, shutdown: &Shutdown) -> Result<Result<(), Error>, Error> {
    let joined = tokio::select! {
        joined = join::join(joining) => joined?,
        () = shutdown.begun() => return Ok(Ok(())),
    };
    Ok(join::serve(joined, shutdown).await)
}

fn address(conductor: Option<String>, rank: Option<u32>) -> Result<(String, Rank), Error> {
    let missing = |field: &str| Error::invalid(field, "is missing");
    Ok((conductor.ok_or_else(|| missing("conductor"))?, Rank(rank.ok_or_else(|| missing("rank"))?)))
}

/// Runs a worker's life on one thread. That suffices for one stream; the other cores belong to the engine.
fn run<T>(telemetry: &Telemetry, life: impl AsyncFnOnce(&Shutdown) -> Result<T, Error>) -> Result<T, Error> {
    name_process();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::internal(format!("cannot start a runtime: {e}")))?;
    runtime.block_on(async {
        let _telemetry = telemetry.install(NAME)?;
        // As the first process of a container, the worker would ignore a signal without a handler.
        let shutdown = Shutdown::on_signals()?;
        life(&shutdown).await
    })
}

/// Sets the name that `ps` and `top` show, whatever the executable is called.
fn name_process() {
    if let Err(error) = rustix::thread::set_name(c"worker") {
        tracing::debug!(%error, "the process keeps its executable's name");
    }
}
