//! The keys of a config of experts, checked.

use serde::Deserialize;
use tutti_kernels::Routing;

use crate::experts::{Division, ExpertShape};

/// The keys of a published config. Any key may be missing or null. Defaults are those of transformers'
/// `Qwen3MoeConfig`.
#[derive(Deserialize)]
pub(super) struct MoeKeys {
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
}

/// The layers with experts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moe {
    pub shape: ExpertShape,
    /// True for each layer with experts; the others have a dense MLP.
    pub sparse: Vec<bool>,
}

impl MoeKeys {
    /// Returns the experts of a model of `layers` layers; `None` if all its layers are dense. The error names the key.
    pub fn resolve(&self, layers: usize, hidden_size: usize) -> Result<Option<Moe>, String> {
        let experts = self.num_experts.unwrap_or(128);
        let step = self.decoder_sparse_step.unwrap_or(1);
        if step == 0 {
            return Err("decoder_sparse_step: must be at least 1, not 0".into());
        }
        let dense = self.mlp_only_layers.as_deref().unwrap_or_default();
        let is_sparse =
            |layer: usize| !dense.contains(&layer) && experts > 0 && (layer + 1).is_multiple_of(step);
        let sparse: Vec<bool> = (0..layers).map(is_sparse).collect();
        if !sparse.contains(&true) {
            return Ok(None);
        }
        let top_k = self.num_experts_per_tok.unwrap_or(8);
        if top_k == 0 || top_k > experts {
            return Err(format!("num_experts_per_tok: {top_k} of num_experts, {experts}"));
        }
        let intermediate_size = self.moe_intermediate_size.unwrap_or(768);
        if intermediate_size == 0 {
            return Err("moe_intermediate_size: must be at least 1, not 0".into());
        }
        let routing = Routing { top_k, renormalise: self.norm_topk_prob.unwrap_or(false) };
        let division = Division::Width;
        let shape = ExpertShape { hidden_size, intermediate_size, experts, routing, division };
        Ok(Some(Moe { shape, sparse }))
    }
}
