//! The inputs of a conductor's backend: the checkpoint, and the settings of the workers.

use std::{
    env,
    path::{Path, PathBuf},
    process,
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tutti_conductor::{
    Backend, BackendOptions, Outliving,
    cluster::{Limits, Served},
    config::{self, Layout},
    listen::ClusterListener,
    random_token,
    state_directory::{self, Inheritance, StateDirectory},
};
use tutti_runtime::{
    Error, VERSION,
    checkpoint::{self, Checkpoint, HubOptions, ModelSource, Wanted},
    process::{Background, Drain, Started},
    progress::LoadDisplay,
    token::Token,
};
use tutti_settings::{ConductorSettings, DeviceChoice, LoadFormat, WorkerSettings};
use tutti_worker::{
    fit::{self, WorkerGroup},
    lifeline::Lifeline,
};

/// Path of the executable of this process, even if the file has been replaced since the start. Workers run the same
/// executable, because they must be of the same build as the conductor.
const WORKER_PROGRAM: &str = "/proc/self/exe";

/// Returns the source of the checkpoint that the settings name.
pub fn source(settings: &ConductorSettings) -> Result<ModelSource, Error> {
    ModelSource::parse(settings.model.model.as_deref())
}

/// A checkpoint, and the settings of the workers that load it.
pub struct Found {
    pub checkpoint: Arc<Checkpoint>,
    worker_settings: Vec<WorkerSettings>,
    inheritance: Option<(Arc<StateDirectory>, Inheritance)>,
}

/// Finds the checkpoint on this machine or downloads it, and checks that the workers can load it. Its config is checked
/// before weights are downloaded. The memory is checked unless `state` is present: the workers of the conductor before
/// may have taken what is used.
pub async fn find(
    source: &ModelSource,
    settings: &ConductorSettings,
    layout: &Layout,
    display: &LoadDisplay,
    state: Option<&Arc<StateDirectory>>,
) -> Result<Found, Error> {
    // Simulated devices need no weights. If any device is simulated, all devices are.
    let simulated = layout.devices.contains(&DeviceChoice::Sim);
    let wanted = match settings.weights.load_format {
        LoadFormat::Auto if !simulated => Wanted::Everything,
        LoadFormat::Auto | LoadFormat::Dummy => Wanted::NoWeights,
    };
    let check =
        |dir: &Path| config::worker_settings(settings, layout, dir)?.iter().try_for_each(fit::check_config);
    let checkpoint = checkpoint::resolve(source, wanted, &HubOptions::from_env(), display, &check).await?;
    let worker_settings = config::worker_settings(settings, layout, &checkpoint.dir)?;
    if state.is_none() {
        check_weights(layout, &worker_settings)?;
    }
    Ok(Found { checkpoint: Arc::new(checkpoint), worker_settings, inheritance: None })
}

/// Takes over the workers of the conductor before, which have the weights in memory already, or ends them. The ports
/// are bound by now, so that a start which fails for a port leaves the workers to the next one.
pub async fn take_over(
    found: Found,
    settings: &ConductorSettings,
    layout: &Layout,
    state: &Arc<StateDirectory>,
) -> Result<Found, Error> {
    let Found { checkpoint, worker_settings, .. } = found;
    let holdings = holdings(settings, layout, &checkpoint, &worker_settings)?;
    let new_settings = || {
        let settings = config::worker_settings(settings, layout, &checkpoint.dir)?;
        settings.iter().map(value).collect()
    };
    let mut inherited = state.succeed(holdings, new_settings).await?;
    inherited.end_broken_replicas(&layout.topology, state).await;
    let worker_settings = inherited.worker_settings.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    match inherited.survivors.len() {
        0 => check_weights(layout, &worker_settings)?,
        workers => tracing::info!(workers, "taking over the workers of the conductor before"),
    }
    Ok(Found { checkpoint, worker_settings, inheritance: Some((state.clone(), inherited)) })
}

fn check_weights(layout: &Layout, workers: &[WorkerSettings]) -> Result<(), Error> {
    // Workers that join by hand load weights of their own machines.
    let spawned = layout.topology.groups().iter().zip(workers).filter(|(group, _)| group.spawned);
    let spawned: Vec<_> =
        spawned.map(|(group, settings)| WorkerGroup { settings, replicas: group.replicas }).collect();
    fit::check_weights(&spawned)
}

/// Variables that decide which devices and libraries a worker finds.
const ENVIRONMENT: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"];

/// Describes this conductor's workers: their model, settings and environment, and how they reach the conductor. A later
/// conductor takes the workers over only if its own description is equal.
fn holdings(
    settings: &ConductorSettings,
    layout: &Layout,
    checkpoint: &Checkpoint,
    workers: &[WorkerSettings],
) -> Result<Value, Error> {
    let groups = layout.topology.groups().iter().zip(workers).map(|(group, settings)| {
        // The share follows from the memory that was free at the start, which workers that run already have taken.
        let settings = WorkerSettings { memory_share: None, ..settings.clone() };
        let ranks = json!({ "replicas": group.replicas, "tp": group.tp, "spawned": group.spawned });
        Ok(json!({ "name": group.name, "ranks": ranks, "settings": value(&settings)? }))
    });
    Ok(json!({
        "version": VERSION,
        "executable": state_directory::executable(Path::new(WORKER_PROGRAM)),
        "model": checkpoint.dir.display().to_string(),
        "worker_listen": value(&settings.membership.worker_listen)?,
        "cluster_tls": value(&settings.cluster_tls)?,
        "successor_timeout": settings.faults.successor_timeout,
        "environment": ENVIRONMENT.map(|name| env::var_os(name).map(|value| value.display().to_string())),
        "groups": groups.collect::<Result<Vec<_>, Error>>()?,
        "files": state_directory::files_of(&checkpoint.dir),
    }))
}

/// The backend's options. Workers dial `listener`.
pub fn options(
    started: &Started<ConductorSettings>,
    layout: &Layout,
    found: Found,
    listener: ClusterListener,
    display: LoadDisplay,
) -> Result<BackendOptions, Error> {
    let settings = &started.settings;
    let Found { checkpoint, worker_settings, inheritance } = found;
    let (spawn_token, outliving) = match inheritance {
        None => (random_token()?, None),
        Some((directory, Inheritance { secret, life, survivors, .. })) => {
            (secret, Some(Outliving { directory, life, survivors }))
        }
    };
    let lifeline = Lifeline {
        parent_pid: process::id(),
        join_token: spawn_token.clone(),
        telemetry: settings.telemetry.clone(),
        cluster_tls: settings.cluster_tls.clone(),
        successor_timeout: outliving.as_ref().map(|_| settings.faults.successor_timeout),
    };
    Ok(BackendOptions {
        limits: Limits {
            topology: layout.topology.clone(),
            model: settings.model.clone(),
            engine: settings.engine.clone(),
            faults: settings.faults.clone(),
        },
        served: Served {
            names: match settings.model.served_names() {
                names if names.is_empty() => vec![checkpoint.name.clone()],
                names => names.into_iter().map(str::to_owned).collect(),
            },
            has_tokenizer: checkpoint.has_tokenizer(),
        },
        listener,
        connections: started.live.connections.clone().into(),
        connection_metrics: started.counts.clone(),
        worker_program: PathBuf::from(WORKER_PROGRAM),
        worker_settings: worker_settings.iter().map(text).collect::<Result<_, _>>()?,
        spawn_token: Token::new("join_token", &spawn_token)?,
        lifeline_line: text(&lifeline)?,
        join_token: config::join_token(settings)?,
        display,
        outliving,
    })
}

fn text(value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("cannot be written as JSON: {e}")))
}

fn value(value: &impl Serialize) -> Result<Value, Error> {
    serde_json::to_value(value).map_err(|e| Error::internal(format!("cannot be written as JSON: {e}")))
}

fn read(settings: &Value) -> Result<WorkerSettings, Error> {
    WorkerSettings::deserialize(settings)
        .map_err(|e| Error::internal(format!("cannot read the settings of the conductor before: {e}")))
}

/// Stops a cluster that has not served any request yet.
pub async fn end(mut backend: Backend) -> Result<(), Error> {
    backend.drain(Drain::new(Duration::ZERO)).await;
    backend.stop().await;
    Ok(())
}
