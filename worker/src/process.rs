//! The worker as a process: spawned by a conductor, or started by hand.

use std::{ffi::OsString, process::ExitCode, time::Duration};

use tutti_proto::Rank;
use tutti_runtime::{
    Error, ErrorKind,
    command_line::{self, processes::WORKER},
    config, descriptors, exit,
    shutdown::{Shutdown, outlive_hangups},
    telemetry::{
        self, Sampling,
        style::{self, LogName},
    },
    tls::ClusterTransport,
    token::Token,
    watched_files::ReloadMetrics,
};
use tutti_settings::{JoinSettings, TelemetrySettings, WorkerProcessSettings};

use crate::{
    join::{self, Arrival, Joining},
    lifeline::Lifeline,
    outlive,
};

const NAME: &str = WORKER.name;

/// `main` of a worker that a conductor has spawned. All of the worker's settings come from the conductor: by the
/// command line, the lifeline at stdin, and the Welcome message. Environment variables are ignored, because they are
/// settings of the conductor.
pub fn spawned(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outlived = outlive_hangups();
    let flags = exit::unless_parsed(
        NAME,
        command_line::parse::<WorkerProcessSettings>(WORKER, arguments),
        exit::USAGE,
    );
    let ended = outlived.and_then(|()| Lifeline::take()).and_then(|lifeline| {
        let settings: WorkerProcessSettings = command_line::settings(flags)?;
        let (conductor, rank) = address(&settings.join)?;
        style::set_style(lifeline.telemetry.log_format, log_name(rank));
        let join_token = Some(Token::new("join_token", &lifeline.join_token)?);
        let transport = ClusterTransport::read(&lifeline.cluster_tls)?;
        let joining = Joining { conductor, rank, join_token, transport, arrival: Arrival::New };
        let patience = lifeline.successor_timeout.map(|seconds| Duration::from_secs(seconds.into()));
        run(&lifeline.telemetry, rank, async |shutdown| {
            tokio::spawn(joining.transport.clone().follow(ReloadMetrics::default()));
            match patience {
                None => join_once(&joining, shutdown).await,
                Some(patience) => outlive::serve_all(joining, patience, shutdown).await,
            }
        })
    });
    match ended {
        Ok(Err(error)) if conductor_knows(&error) => ExitCode::from(exit::code(&error)),
        ended => exit::run(NAME, || ended?),
    }
}

/// True if the conductor learns this error from the stream and reports it once for all workers. The worker then prints
/// nothing.
fn conductor_knows(error: &Error) -> bool {
    error.kind() == ErrorKind::Unavailable || exit::code(error) == exit::USAGE
}

/// `main` of a worker that is started by hand. If its conductor goes away, the worker waits for a new conductor at the
/// same address.
pub fn by_hand(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    exit::run(NAME, || {
        outlive_hangups()?;
        let WorkerProcessSettings { join, telemetry, cluster_tls } =
            config::load(WORKER, arguments)?.settings;
        let (conductor, rank) = address(&join)?;
        style::set_style(telemetry.log_format, log_name(rank));
        let (join_token, transport) = (join_token(&join)?, ClusterTransport::read(&cluster_tls)?);
        let joining = Joining { conductor, rank, join_token, transport, arrival: Arrival::New };
        run(&telemetry, rank, async |shutdown| {
            tokio::spawn(joining.transport.clone().follow(ReloadMetrics::default()));
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

/// Joins and serves once. The outer error comes from joining, the inner error from serving. A shutdown during joining
/// is not an error.
async fn join_once(joining: &Joining, shutdown: &Shutdown) -> Result<Result<(), Error>, Error> {
    let joined = tokio::select! {
        joined = join::join(joining) => joined?,
        () = shutdown.begun() => return Ok(Ok(())),
    };
    Ok(join::serve(joined, shutdown).await)
}

fn address(settings: &JoinSettings) -> Result<(String, Rank), Error> {
    let missing = |field: &str| Error::invalid(field, "is missing");
    let conductor = settings.conductor.clone().ok_or_else(|| missing("conductor"))?;
    Ok((conductor, Rank(settings.rank.ok_or_else(|| missing("rank"))?)))
}

/// Join secret of a worker that is started by hand; `None` if no file is set.
fn join_token(settings: &JoinSettings) -> Result<Option<Token>, Error> {
    settings.join_token_file.as_deref().map(|path| Token::read("join_token_file", path)).transpose()
}

/// Runs `life` on this thread alone. One thread suffices for one stream, and the other cores are left to the engine.
fn run<T>(
    telemetry: &TelemetrySettings,
    rank: Rank,
    life: impl AsyncFnOnce(&Shutdown) -> Result<T, Error>,
) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::internal(format!("cannot start a runtime: {e}")))?;
    runtime.block_on(async {
        let _telemetry = telemetry::install(telemetry, log_name(rank), Sampling::OfSampled)?;
        // Both log what they cannot do, so logging comes first.
        name_process();
        descriptors::raise_limit();
        // The first process of a container ignores signals without a handler, so handlers are installed.
        let shutdown = Shutdown::on_signals()?;
        life(&shutdown).await
    })
}

fn log_name(rank: Rank) -> LogName {
    LogName { process: NAME, rank: Some(rank.0) }
}

/// Sets the name that `ps` and `top` show, because the executable may have another name.
fn name_process() {
    if let Err(error) = rustix::thread::set_name(c"worker") {
        tracing::debug!(%error, "the process keeps its executable's name");
    }
}
