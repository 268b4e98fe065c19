//! The process's metrics, in the OpenMetrics text format of Prometheus.

mod declare;
mod identity;
mod process;
mod readiness;
mod vllm;

use std::sync::{Arc, OnceLock};

pub use self::identity::SettingsMetrics;
use parking_lot::RwLock;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
pub use prometheus_client::{
    collector::Collector,
    encoding, metrics,
    registry::{Registry, Unit},
};

use crate::watched_files::ReloadMetrics;

/// The content type of `/metrics`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The text between a sample and its exemplar.
const EXEMPLAR: &str = " # {";

/// The metrics of one process. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<RwLock<Registry>>,
    /// Metrics whose labels name callers; `None` if they are not shown.
    named: Option<Arc<RwLock<Registry>>>,
    reloads: Arc<OnceLock<ReloadMetrics>>,
    /// Metrics whose names another project's conventions prescribe.
    conventional: Arc<RwLock<Registry>>,
    /// The served model, once it is known, if metrics have the names of vLLM, too.
    vllm: Option<Arc<RwLock<String>>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let prefixed = || Arc::new(RwLock::new(Registry::with_prefix("tutti")));
        let (reloads, conventional) = Default::default();
        Self { registry: prefixed(), named: Some(prefixed()), reloads, conventional, vllm: None }
    }
}

impl Metrics {
    /// Registers a component's metrics, once, when it starts. Names get the prefix `tutti_`.
    pub fn register<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(&mut self.registry.write())
    }

    /// Registers metrics of one kind of process, such as `router`. Names get the prefix `tutti_` and then that kind.
    pub fn register_of<T>(&self, process: &str, add: impl FnOnce(&mut Registry) -> T) -> T {
        self.register(|registry| add(registry.sub_registry_with_prefix(process)))
    }

    /// Registers metrics whose labels name callers, such as holders of API keys. If such metrics are not shown, the
    /// call has no effect. Names get the prefix `tutti_` and then the kind of process.
    pub fn register_named<T>(&self, process: &str, add: impl FnOnce(&mut Registry) -> T) -> T {
        match &self.named {
            Some(named) => add(named.write().sub_registry_with_prefix(process)),
            None => add(&mut Registry::default()),
        }
    }

    /// These metrics without those whose labels name callers.
    pub fn without_names(&self) -> Self {
        Self { named: None, ..self.clone() }
    }

    /// The metrics of files that are read again when they change. The first call registers them.
    pub fn reloads(&self) -> ReloadMetrics {
        self.reloads.get_or_init(|| self.register(ReloadMetrics::register)).clone()
    }

    /// Registers metrics whose names conventions prescribe, such as those of OpenTelemetry. Names get no prefix.
    pub fn register_conventional<T>(&self, add: impl FnOnce(&mut Registry) -> T) -> T {
        add(&mut self.conventional.write())
    }

    /// These metrics, some of them under the names of vLLM, too.
    #[must_use]
    pub fn with_names_of_vllm(self) -> Self {
        Self { vllm: Some(Arc::default()), ..self }
    }

    /// Sets the name of the served model, the label of metrics with names of vLLM.
    pub fn serve_model(&self, name: &str) {
        if let Some(model) = &self.vllm {
            name.clone_into(&mut model.write());
        }
    }

    /// The text of all metrics, without exemplars, which some readers refuse.
    pub fn encode(&self) -> String {
        let text = self.encode_with_exemplars();
        if !text.contains(EXEMPLAR) {
            return text;
        }
        let mut plain = String::with_capacity(text.len());
        for line in text.lines() {
            let is_bucket = line.split_once('{').is_some_and(|(name, _)| name.ends_with("_bucket"));
            let kept = line.rsplit_once(EXEMPLAR).filter(|_| is_bucket).map_or(line, |(sample, _)| sample);
            plain.push_str(kept);
            plain.push('\n');
        }
        plain
    }

    /// The text of all metrics, with the traces of sampled requests as exemplars.
    pub fn encode_with_exemplars(&self) -> String {
        let mut text = String::new();
        let encode = |text: &mut String| -> Result<(), std::fmt::Error> {
            encode_registry(text, &self.registry.read())?;
            if let Some(named) = &self.named {
                encode_registry(text, &named.read())?;
            }
            encode_registry(text, &self.conventional.read())?;
            if let Some(model) = &self.vllm {
                let copies = vllm::copies(text, &model.read());
                text.push_str(&copies);
            }
            Ok(())
        };
        // Writing to a String cannot fail, so an error comes from a collector. The text then ends at that collector and
        // lacks all later ones.
        if encode(&mut text).and_then(|()| encode_eof(&mut text)).is_err() {
            tracing::error!("a metrics collector failed; /metrics is incomplete");
        }
        text
    }
}

#[cfg(test)]
mod tests;
