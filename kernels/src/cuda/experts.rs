//! State of experts that the device keeps from step to step: addresses of matrices, and counts of tokens.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::context::Gpu;
use super::memory::{DeviceBuffer, DevicePointer, in_step};
use super::staging::{Pair, Staging};
use crate::DeviceError;

/// Bytes per count and per address.
const WORD: usize = size_of::<u64>();

/// The addresses of each layer's matrices, on the GPU. They are uploaded when the layer first runs, before the first
/// request. Later steps compare the addresses on the host, and upload them again only if the matrices have changed.
#[derive(Default)]
pub(super) struct ExpertTables {
    layers: BTreeMap<usize, Table>,
}

struct Table {
    addresses: Vec<u64>,
    data: DeviceBuffer,
}

impl ExpertTables {
    /// Returns the address of a layer's table on the GPU.
    pub(super) fn of_layer(
        &mut self,
        layer: usize,
        addresses: impl Iterator<Item = u64> + Clone,
        gpu: &Arc<Gpu>,
        staging: &mut Staging,
    ) -> Result<DevicePointer<u64>, DeviceError> {
        if let Some(table) = self.layers.get(&layer)
            && table.addresses.iter().copied().eq(addresses.clone())
        {
            return Ok(table.data.at());
        }
        let addresses: Vec<_> = addresses.collect();
        let bytes = addresses.len() * WORD;
        let data = DeviceBuffer::new(gpu, bytes, "addresses of experts").map_err(in_step)?;
        let mut pair = staging.take(bytes)?;
        for (to, address) in pair.host.bytes_mut().chunks_exact_mut(WORD).zip(&addresses) {
            to.copy_from_slice(&address.to_ne_bytes());
        }
        data.copy_in(0, &pair.host, bytes)?;
        staging.keep(pair);
        let at = data.at();
        self.layers.insert(layer, Table { addresses, data });
        Ok(at)
    }
}

/// The counts at the end of a step, while they are copied to the host.
pub(super) struct CountsOfStep {
    pair: Pair,
    /// Number of counts.
    len: usize,
}

/// The number of tokens that chose each expert. The GPU counts them, and each step copies all counts to the host with
/// its results. A reader therefore never waits for later steps.
#[derive(Default)]
pub(super) struct ExpertCounts {
    /// Range of each layer's counts.
    layers: BTreeMap<usize, Range<usize>>,
    /// Number of counts of all layers.
    len: usize,
    on_gpu: Option<DeviceBuffer>,
    /// True if the current step has experts to count.
    is_counting: bool,
    /// Counts up to the last collected step. Layers that first ran in a later step are missing.
    collected: Vec<u64>,
}

impl ExpertCounts {
    /// Returns the address of a layer's counts on the GPU. The counts start at zero, and restart at zero if the layer's
    /// number of experts changes.
    pub(super) fn of_layer(
        &mut self,
        layer: usize,
        experts: usize,
        gpu: &Arc<Gpu>,
    ) -> Result<DevicePointer<u64>, DeviceError> {
        self.is_counting = true;
        let known = self.layers.get(&layer).filter(|range| range.len() == experts).map(|range| range.start);
        let start = known.unwrap_or(self.len);
        if known.is_none() {
            self.layers.insert(layer, start..start + experts);
            self.len += experts;
        }
        let (held, bytes) = (self.on_gpu.as_ref().map_or(0, DeviceBuffer::bytes), self.len * WORD);
        if held < bytes {
            let size = bytes.next_power_of_two();
            let grown = DeviceBuffer::zeroed(gpu, size, "counts of experts' tokens").map_err(in_step)?;
            if let Some(old) = &self.on_gpu {
                grown.copy_from(0, old, 0, held)?;
            }
            self.on_gpu = Some(grown);
        }
        let at = self.on_gpu.as_ref().map(DeviceBuffer::at);
        at.map(|at| at.add(start)).ok_or_else(|| DeviceError::Misuse("a layer of no experts".to_owned()))
    }

    /// If the step counts tokens, enqueues the copy of all counts to the host.
    pub(super) fn fetch(&mut self, staging: &mut Staging) -> Result<Option<CountsOfStep>, DeviceError> {
        let (true, Some(counts)) = (std::mem::take(&mut self.is_counting), &self.on_gpu) else {
            return Ok(None);
        };
        let bytes = self.len * WORD;
        let mut pair = staging.take(bytes)?;
        counts.copy_out(0, bytes, &mut pair.host, 0)?;
        Ok(Some(CountsOfStep { pair, len: self.len }))
    }

    /// Takes the counts of a step that has ended, and returns their memory to `staging`.
    pub(super) fn collect(&mut self, CountsOfStep { pair, len }: CountsOfStep, staging: &mut Staging) {
        let (words, _) = pair.host.bytes().as_chunks::<WORD>();
        self.collected.clear();
        self.collected.extend(words.iter().take(len).map(|word| u64::from_ne_bytes(*word)));
        staging.give(pair);
    }

    /// Returns the collected counts of a layer, one per expert. The result is empty until a step with the layer is
    /// collected.
    pub(super) fn collected(&self, layer: usize) -> &[u64] {
        let range = self.layers.get(&layer).cloned();
        range.and_then(|range| self.collected.get(range)).unwrap_or_default()
    }
}
