//! The memory that a model will take, computed from its config and the headers of its weights before anything is
//! loaded.

use tutti_kernels::{
    Device, INT4_GROUP, Quantize, QuantizedType, WeightType, collective::GroupRank, quantize_of_head,
};

use crate::{
    LoadError, LoadOptions,
    decoder::{EndSpecs, RankPlanes, TextShape},
    weights::{Precision, Source, TensorSpec, check_groups},
};

/// Number of inputs that share a scale of four bytes in int8.
const INT8_GROUP: usize = 128;

/// The memory of one rank, as its device will hold it. The sizes are lower bounds: they count no padding, no screen of
/// the LM head, no wider form of quantised matrices that are fused with others, no scales of whole rows that a CPU
/// repeats, and no buffers of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Bytes of the weights, in their stored or quantised form.
    pub weight_bytes: u64,
    /// Bytes of the weights on a device that dequantises the matrices which the checkpoint stores quantised.
    pub dequantised_bytes: u64,
    /// True if the checkpoint stores matrices as integers of four bits, and they stay so.
    pub has_int4: bool,
    /// Bytes per KV page, over all layers.
    pub page_bytes: u64,
    /// Bytes per slot of requests' state.
    pub slot_bytes: u64,
}

impl Footprint {
    /// Computes the memory of one rank. `layers` are the tensors of its layers. Checks every tensor.
    pub(crate) fn of<'s>(
        shape: &TextShape,
        layers: impl Iterator<Item = &'s TensorSpec>,
        source: &Source,
        options: &LoadOptions,
        rank: GroupRank,
    ) -> Result<Self, LoadError> {
        let ends = EndSpecs::fewest(shape, source);
        let (mut weight_bytes, mut dequantised_bytes, mut has_int4) = (0u64, 0u64, false);
        let mut add = |spec: &TensorSpec, quantize| {
            check_groups(spec, quantize, rank)?;
            let range = spec.shard_range(rank);
            let dtype = source.check_range(spec, &range)?;
            let bytes = held_bytes(spec, dtype, quantize, rank);
            dequantised_bytes = dequantised_bytes.saturating_add(bytes);
            let bytes = match source.form(spec, quantize)? {
                None => bytes,
                Some(form) => {
                    has_int4 |= form.element == QuantizedType::Int4;
                    let columns = range.columns.len();
                    form.bytes(range.elements() / columns.max(1), columns)
                }
            };
            weight_bytes = weight_bytes.saturating_add(bytes);
            Ok::<_, LoadError>(())
        };
        let of_ends = quantize_of_head(options.quantize);
        ends.all().try_for_each(|spec| add(spec, of_ends))?;
        for spec in layers {
            add(spec, options.quantize)?;
        }
        let dtype = source.check(&ends.embedding)?;
        let planes = RankPlanes::new(shape, source, options, dtype, rank)?;
        Ok(Self {
            weight_bytes,
            dequantised_bytes,
            has_int4,
            page_bytes: planes.page_bytes() as u64,
            slot_bytes: planes.slot_bytes().map(|bytes| bytes as u64).sum(),
        })
    }

    /// Returns the memory of this rank on a device.
    #[must_use]
    pub fn on_device<D: Device>(self, device: &D) -> Self {
        let weight_bytes = if device.holds_quantized() { self.weight_bytes } else { self.dequantised_bytes };
        Self { weight_bytes, ..self }
    }
}

/// Returns the bytes of a rank's part of a tensor. `stored` is the type of its elements in the checkpoint.
fn held_bytes(spec: &TensorSpec, stored: WeightType, quantize: Quantize, rank: GroupRank) -> u64 {
    let range = spec.shard_range(rank);
    let (elements, columns) = (range.elements() as u64, range.columns.len());
    let is_matrix = spec.dims.columns > 1;
    match (spec.precision, quantize) {
        (Precision::Type(dtype), _) => elements.saturating_mul(dtype.bytes() as u64),
        (Precision::Configured, Quantize::Int8) if is_matrix => {
            let rows = elements / (columns.max(1) as u64);
            let scales = rows.saturating_mul(4 * columns.div_ceil(INT8_GROUP) as u64);
            elements.saturating_add(scales)
        }
        (Precision::Configured, Quantize::Int4) if is_matrix => {
            let rows = elements / (columns.max(1) as u64);
            let scales = rows.saturating_mul(2 * columns.div_ceil(INT4_GROUP) as u64);
            (elements / 2).saturating_add(scales)
        }
        (Precision::Configured | Precision::Stored, _) => elements.saturating_mul(stored.bytes() as u64),
    }
}
