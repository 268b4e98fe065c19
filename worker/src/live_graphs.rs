//! The graphs that an engine runs, which it cancels when its conductor is gone.

use std::collections::HashMap;

use tokio::sync::oneshot;
use tutti_proto::{GraphKey, cluster::v1 as pb};

use crate::engine_thread::Lifetime;

/// The graphs that run, with their prompts if the engine outlives its conductor.
pub struct LiveGraphs {
    lifetime: Lifetime,
    prompts: HashMap<GraphKey, pb::HeldPrompt>,
    /// The abandoned graphs' prompts, and the channel to which they go once the graphs have ended.
    abandoned: Option<(oneshot::Sender<Vec<pb::HeldPrompt>>, Vec<pb::HeldPrompt>)>,
}

impl LiveGraphs {
    /// No graphs.
    pub fn new(lifetime: Lifetime) -> Self {
        Self { lifetime, prompts: HashMap::new(), abandoned: None }
    }

    /// Adds a graph that is about to be launched.
    pub fn launched(&mut self, graph: &pb::LaunchGraph) {
        let (Lifetime::ManyConductors, Some(key)) = (self.lifetime, graph.key) else { return };
        // Prompts with media are not compared, because all media of a kind have the same tokens.
        let spec = graph.spec.as_ref().filter(|spec| spec.media.is_empty());
        let prompt = spec.map(|spec| {
            let tokens = spec.prompt.iter().chain(&graph.generated).copied().collect();
            pb::HeldPrompt { tokens, cache_salt: spec.cache_salt.clone() }
        });
        self.prompts.insert(key.into(), prompt.unwrap_or_default());
    }

    /// Removes a graph that has ended.
    pub fn ended(&mut self, key: GraphKey) {
        self.prompts.remove(&key);
    }

    /// Abandons all graphs, and returns them for the engine to cancel. Their prompts go to `answer`.
    pub fn abandon(
        &mut self,
        answer: oneshot::Sender<Vec<pb::HeldPrompt>>,
    ) -> impl Iterator<Item = GraphKey> + use<> {
        let prompts = self.prompts.values().filter(|prompt| !prompt.tokens.is_empty()).cloned().collect();
        self.abandoned = Some((answer, prompts));
        self.prompts.keys().copied().collect::<Vec<_>>().into_iter()
    }

    /// True if the graphs were abandoned, and the answer is not sent yet.
    pub fn is_abandoned(&self) -> bool {
        self.abandoned.is_some()
    }

    /// Answers that all abandoned graphs have ended.
    pub fn answer(&mut self) {
        if let Some((answer, prompts)) = self.abandoned.take() {
            // Ignored: nobody waits for the answer if the process is ending.
            let _ = answer.send(prompts);
        }
    }
}

#[cfg(test)]
mod tests;
