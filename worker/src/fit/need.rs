//! The memory that workers need at least.

use tutti_engine::least_bytes;
use tutti_models::Footprint;
use tutti_runtime::{Error, ErrorKind, memory::Size};
use tutti_settings::{Quantize, WorkerSettings};

/// The least memory of several workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    workers: u32,
    weight_bytes: u64,
    plane_bytes: u64,
    /// True if some weights are not quantised yet.
    can_quantise: bool,
}

/// The memory that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryKind {
    /// The memory of the host, of which this process may have `total` bytes, free or not.
    Host { total: u64 },
    /// The memory of a device of its own.
    Device,
}

impl Need {
    /// Adds `replicas` workers that each hold one rank. Weights that are mapped from a file of packed weights need no
    /// memory: the kernel can drop their pages.
    pub fn add(&mut self, rank: &Footprint, settings: &WorkerSettings, replicas: u32) {
        let is_mapped = settings.weights.packed_weights.is_some();
        let weights = if is_mapped { 0 } else { rank.weight_bytes };
        let planes = least_bytes(rank.page_bytes, rank.slot_bytes, &settings.engine);
        self.workers += replicas;
        self.weight_bytes = self.weight_bytes.saturating_add(weights.saturating_mul(replicas.into()));
        self.plane_bytes = self.plane_bytes.saturating_add(planes.saturating_mul(replicas.into()));
        self.can_quantise |= settings.weights.quantize == Quantize::None;
    }

    pub fn bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.plane_bytes)
    }

    /// The error that this much memory is not there. `free` says how much is. Memory that others hold may be free when
    /// the process is started again, so only a need above the total is a fault of the settings.
    pub fn refused(&self, free: &str, kind: MemoryKind) -> Error {
        let on_host = kind != MemoryKind::Device;
        let (weights, planes) = (Size(self.weight_bytes), Size(self.plane_bytes));
        let of = match self.workers {
            1 => String::new(),
            workers => format!(" of {workers} workers"),
        };
        let mut remedies = Vec::new();
        if self.workers > 1 {
            remedies.push("fewer workers (--workers)");
        }
        if self.can_quantise {
            remedies.push("--quantize int8 or int4");
        }
        remedies.push(if on_host { "more memory" } else { "more GPUs (--tp)" });
        remedies.push("a smaller model");
        let last = remedies.pop().unwrap_or_default();
        let message = format!(
            "the weights{of} take {weights} and the smallest planes {planes}, but {free}: take {} or {last}",
            remedies.join(", ")
        );
        match kind {
            MemoryKind::Host { total } if self.bytes() > total => Error::invalid("model", message),
            _ => Error::new(ErrorKind::Internal, message).with_field("model"),
        }
    }
}

#[cfg(test)]
mod tests;
