//! The inputs of a conductor's backend: the checkpoint, and the settings of the workers.

use std::{
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use tutti_conductor::{
    Backend, BackendOptions,
    cluster::{Limits, Served},
    config::{self, Layout},
    listen::ClusterListener,
    random_token,
};
use tutti_runtime::{
    Error,
    checkpoint::{self, Checkpoint, HubOptions, ModelSource, Wanted},
    process::{Background, Drain, Started},
    progress::LoadDisplay,
    token::Token,
};
use tutti_settings::{ConductorSettings, DeviceChoice, LoadFormat};
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

/// Finds the checkpoint on this machine or downloads it, and checks that the workers can load it. Its config is checked
/// before weights are downloaded.
pub async fn checkpoint(
    source: &ModelSource,
    settings: &ConductorSettings,
    layout: &Layout,
    display: &LoadDisplay,
) -> Result<Checkpoint, Error> {
    // Simulated devices need no weights. If any device is simulated, all devices are.
    let simulated = layout.devices.contains(&DeviceChoice::Sim);
    let wanted = match settings.weights.load_format {
        LoadFormat::Auto if !simulated => Wanted::Everything,
        LoadFormat::Auto | LoadFormat::Dummy => Wanted::NoWeights,
    };
    let check =
        |dir: &Path| config::worker_settings(settings, layout, dir)?.iter().try_for_each(fit::check_config);
    let checkpoint = checkpoint::resolve(source, wanted, &HubOptions::from_env(), display, &check).await?;
    let workers = config::worker_settings(settings, layout, &checkpoint.dir)?;
    // Workers that join by hand load weights of their own machines.
    let spawned = layout.topology.groups().iter().zip(&workers).filter(|(group, _)| group.spawned);
    let spawned: Vec<_> =
        spawned.map(|(group, settings)| WorkerGroup { settings, replicas: group.replicas }).collect();
    fit::check_weights(&spawned)?;
    Ok(checkpoint)
}

/// The backend's options. Workers dial `listener`.
pub fn options(
    started: &Started<ConductorSettings>,
    layout: &Layout,
    checkpoint: &Checkpoint,
    listener: ClusterListener,
    display: LoadDisplay,
) -> Result<BackendOptions, Error> {
    let settings = &started.settings;
    let worker_settings = config::worker_settings(settings, layout, &checkpoint.dir)?;
    let spawn_token = random_token()?;
    let lifeline = Lifeline {
        parent_pid: process::id(),
        join_token: spawn_token.clone(),
        telemetry: settings.telemetry.clone(),
        cluster_tls: settings.cluster_tls.clone(),
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
            has_tokenizer: checkpoint.dir.join(checkpoint::CheckpointFile::Tokenizer.name()).is_file(),
        },
        listener,
        connections: started.live.connections.clone().into(),
        connection_metrics: started.counts.clone(),
        worker_program: PathBuf::from(WORKER_PROGRAM),
        worker_settings: worker_settings.iter().map(json).collect::<Result<_, _>>()?,
        spawn_token: Token::new("join_token", &spawn_token)?,
        lifeline_line: json(&lifeline)?,
        join_token: config::join_token(settings)?,
        display,
    })
}

fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("cannot be written as JSON: {e}")))
}

/// Stops a cluster that has not served any request yet.
pub async fn end(mut backend: Backend) -> Result<(), Error> {
    backend.drain(Drain::new(Duration::ZERO)).await;
    backend.stop().await;
    Ok(())
}
