//! Loads a server and reports what was measured.

use std::{fs, io::Write, path::PathBuf, process::ExitCode, sync::Arc};

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tutti_bench::{
    Error,
    arguments::{Arguments, Plan},
    client::Client,
    report::{Description, Report, Served},
    run::{Load, run, warm_up},
};
use tutti_measure::machine::Machine;

/// Number of warm-up requests in flight.
const WARM_UP_CONCURRENCY: usize = 8;
/// Exit code of wrong usage, the same as that of Tutti's other executables.
const USAGE: u8 = 64;
/// Exit code if the server cannot be reached or the generator is at fault.
const UNAVAILABLE: u8 = 70;
/// Exit code of an interrupted run.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let arguments = Arguments::try_parse().unwrap_or_else(|error| {
        // A write error on stderr cannot be reported.
        let _ = error.print();
        std::process::exit(if error.use_stderr() { USAGE.into() } else { 0 })
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let measured = runtime
        .map_err(|e| Error::Internal(format!("cannot start a runtime: {e}")))
        .and_then(|runtime| runtime.block_on(measure(arguments.plan()?)));
    match measured {
        Ok(Report { interrupted: true, .. }) => ExitCode::from(INTERRUPTED),
        Ok(report) if report.all_served() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("tutti-bench: {error}");
            ExitCode::from(if error.is_usage() { USAGE } else { UNAVAILABLE })
        }
    }
}

/// Runs the load and writes the report.
async fn measure(plan: Plan) -> Result<Report, Error> {
    let no_signals = |e| Error::Internal(format!("cannot wait for signals: {e}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let mut interruption = std::pin::pin!(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    });
    let machine = Machine::this();
    let prepare = async {
        let client = Arc::new(Client::new(&plan.target).await?);
        let mut requests = plan.workload.start()?;
        let at_once = match plan.load {
            Load::Closed { concurrency } => concurrency,
            Load::Open { max_in_flight, .. } => max_in_flight.min(WARM_UP_CONCURRENCY),
        };
        let failure = warm_up(&client, &mut requests, plan.warm_up, at_once).await?;
        Ok::<_, Error>((client, requests, failure))
    };
    let (client, requests, failure) = tokio::select! {
        prepared = prepare => prepared?,
        () = &mut interruption => return Err(Error::Internal("interrupted before the run began".into())),
    };
    let target =
        Served { url: plan.target.url.clone(), api: plan.target.api, model: client.model().to_owned() };
    let description = Description {
        command: std::env::args().collect(),
        started: jiff::Timestamp::now().to_string(),
        machine,
        target,
        load: plan.described_load,
        workload: plan.described_workload,
        warm_up: plan.warm_up,
        objectives: plan.objectives,
        warnings: failure.map(|why| format!("a request of the warm-up failed: {why}")).into_iter().collect(),
    };
    let measured = run(client, requests, plan.load, plan.limits, plan.objectives, interruption).await?;
    let report = Report::new(description, &measured);
    let write = |file: &PathBuf, text: String| {
        fs::write(file, text).map_err(|error| Error::File { file: file.clone(), error })
    };
    if let Some(file) = &plan.json {
        let text = report.json().map_err(|e| Error::Internal(format!("the report is no JSON: {e}")))?;
        write(file, text)?;
    }
    if let Some(file) = &plan.html {
        write(file, report.html())?;
    }
    let shown = std::io::stdout().write_all(report.text().as_bytes());
    shown.map_err(|error| Error::File { file: "standard output".into(), error })?;
    Ok(report)
}
