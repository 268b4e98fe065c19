//! The checked keys of a config that describe experts.

use super::variant::{ExpertRules, Renormalise};
use crate::{
    LoadError,
    config::{keys::Keys, ranges, text::TextConfig},
    experts::{ExpertShape, ExpertSizes},
};

/// The shape of the experts, and the layers that have experts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Moe {
    pub shape: ExpertShape,
    /// Per layer: true if it has experts, false if it has a dense MLP.
    pub sparse: Vec<bool>,
}

impl Moe {
    /// Reads and checks the keys. Returns `None` if all layers have a dense MLP.
    pub fn read(keys: &Keys<'_>, text: &TextConfig, rules: ExpertRules) -> Result<Option<Self>, LoadError> {
        let sizes = ExpertSizes::read(keys, rules.sizes)?;
        let renormalise = match rules.renormalise {
            Renormalise::ByKey(default) => keys.get_or(&ranges::NORM_TOPK_PROB, default)?,
            Renormalise::Always => true,
        };
        let step = keys.get_or(&ranges::DECODER_SPARSE_STEP, 1)?;
        let mut sparse: Vec<bool> =
            (1..=text.layers).map(|layer| sizes.experts > 0 && layer.is_multiple_of(step)).collect();
        for layer in keys.get_or(&ranges::MLP_ONLY_LAYERS, Vec::new())? {
            // As in transformers, the index of a layer that the model lacks is ignored.
            if let Some(sparse) = sparse.get_mut(layer) {
                *sparse = false;
            }
        }
        if !sparse.contains(&true) {
            return Ok(None);
        }
        let shape = sizes.check(text, renormalise).map_err(|problem| keys.in_file(problem))?;
        Ok(Some(Self { shape, sparse }))
    }
}
