//! Loads of experts: how the tokens of a model are distributed among the experts of each layer.

use tutti_kernels::{DeviceError, Experts};

/// Load of the experts of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertLoad {
    /// Index of the layer among all layers of the model.
    pub layer: usize,
    /// Number of experts.
    pub experts: usize,
    /// Number of tokens of all experts. A token counts once per expert that it chose.
    pub tokens: u64,
    /// Number of tokens of the expert with the most tokens.
    pub most: u64,
}

/// The loads of a model's layers since the last [`restart`](Self::restart).
pub(crate) struct ExpertCounts {
    layers: Vec<Layer>,
    /// Buffer for the counts of one layer.
    now: Vec<u64>,
}

struct Layer {
    index: usize,
    /// The device's counts at the last restart, one per expert. Empty if the layer had not run before.
    start: Vec<u64>,
}

impl ExpertCounts {
    /// Creates counts that include all tokens since the device was opened. `layers` are the indices of the layers with
    /// experts.
    pub fn new(layers: &[usize]) -> Self {
        let layers = layers.iter().map(|&index| Layer { index, start: Vec::new() }).collect();
        Self { layers, now: Vec::new() }
    }

    /// Sets all counts to 0.
    pub fn restart(&mut self, device: &mut impl Experts) -> Result<(), DeviceError> {
        self.layers.iter_mut().try_for_each(|layer| device.expert_tokens(layer.index, &mut layer.start))
    }

    /// Sets `out` to the loads of the layers that have run since the last restart.
    pub fn read(&mut self, device: &mut impl Experts, out: &mut Vec<ExpertLoad>) -> Result<(), DeviceError> {
        out.clear();
        for Layer { index, start } in &self.layers {
            device.expert_tokens(*index, &mut self.now)?;
            self.now.iter_mut().zip(start).for_each(|(now, start)| *now -= start);
            let load = ExpertLoad {
                layer: *index,
                experts: self.now.len(),
                tokens: self.now.iter().sum(),
                most: self.now.iter().copied().max().unwrap_or(0),
            };
            out.extend(Some(load).filter(|load| load.tokens > 0));
        }
        Ok(())
    }
}
