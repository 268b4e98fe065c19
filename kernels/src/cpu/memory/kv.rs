//! The paged KV plane and its layout.
//!
//! A page of a layer holds, for each head, `page_tokens` keys and then `page_tokens` values, both in panels (see
//! [`super::format`]). The lanes of a panel of keys are sixteen tokens and its inputs are the elements of the head, so
//! that the scores of sixteen keys are one matrix product. The lanes of a panel of values are sixteen elements of the
//! head and its inputs are sixteen tokens, so that a weighted sum is one matrix product, too. The panels that hold the
//! values of the same sixteen tokens are adjacent. Panels of fp8 have the order of elements that bfloat16 has.

use std::ops::Range;

use crate::cpu::memory::format::{Bf16, Format, Stored};
use crate::cpu::memory::{Buffer, Element};
use crate::cpu::simd::LANES;
use crate::cpu::threads::ThreadPool;
use crate::{AttentionShape, DeviceError, KvScales, KvShape, KvType, PageId, e4m3};

/// The name of the layout that this module documents. Workers exchange pages only if their layouts have the same name.
pub(in crate::cpu) const FORMAT: &str = "cpu: panels of 16 keys, then panels of 16 values";

/// The name of the pool in errors.
pub(in crate::cpu) const KV_POOL: &str = "the KV pool";

/// Number of elements per panel of values: sixteen elements of the head by sixteen tokens.
pub(in crate::cpu) const VALUE_PANEL: usize = LANES * LANES;

/// The pages of a KV plane, which hold keys and values of all layers.
pub(in crate::cpu) struct KvPool {
    pub(in crate::cpu) shape: KvShape,
    pub(in crate::cpu) data: KvData,
    /// The scales of each layer. Empty if all are 1.
    scales: Vec<KvScales>,
}

/// The elements of a pool.
pub(in crate::cpu) enum KvData {
    /// Elements of a type that weights have, too.
    Full(Stored),
    /// Floats of type e4m3.
    Fp8(Buffer<u8>),
}

/// A type of elements that keys and values are stored in.
pub(in crate::cpu) trait KvFormat: Copy + Send + Sync + 'static {
    /// The type of one element in memory.
    type Raw: Element;
    /// Returns the index of an element within a step: see [`Format::index_in_step`].
    fn index_in_step(parity: usize, lane: usize) -> usize;
    /// Rounds to the nearest number of this type, ties to even.
    fn narrow(x: f32) -> Self::Raw;
}

impl<W: Format> KvFormat for W {
    type Raw = <W as Format>::Raw;
    #[inline(always)]
    fn index_in_step(parity: usize, lane: usize) -> usize {
        <W as Format>::index_in_step(parity, lane)
    }
    #[inline(always)]
    fn narrow(x: f32) -> <W as Format>::Raw {
        <W as Format>::narrow(x)
    }
}

/// Floats of type e4m3, in the order of bfloat16.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Fp8;

impl KvFormat for Fp8 {
    type Raw = u8;
    #[inline(always)]
    fn index_in_step(parity: usize, lane: usize) -> usize {
        <Bf16 as Format>::index_in_step(parity, lane)
    }
    #[inline(always)]
    fn narrow(x: f32) -> u8 {
        e4m3::nearest(x)
    }
}

impl KvData {
    fn zeroed(dtype: KvType, len: Option<usize>) -> Result<Self, DeviceError> {
        Ok(match dtype {
            KvType::Full(dtype) => Self::Full(Stored::zeroed(dtype, len, KV_POOL)?),
            KvType::Fp8(_) => Self::Fp8(Buffer::zeroed(len, KV_POOL)?),
        })
    }

    /// Takes all memory from the operating system at once: see [`Buffer::make_resident`].
    pub(in crate::cpu) fn make_resident(&mut self, pool: &mut ThreadPool) -> Result<(), DeviceError> {
        match self {
            Self::Full(data) => data.make_resident(pool, KV_POOL),
            Self::Fp8(data) => data.make_resident(pool, KV_POOL),
        }
    }

    /// The elements as bytes.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        match self {
            Self::Full(data) => data.bytes(),
            Self::Fp8(data) => data,
        }
    }

    /// The elements as bytes, for writing.
    pub(in crate::cpu) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Full(data) => data.bytes_mut(),
            Self::Fp8(data) => data,
        }
    }
}

impl KvPool {
    /// Allocates the pages of a plane. `scales` are those of its layers, or none if all are 1.
    pub(in crate::cpu) fn zeroed(shape: KvShape, scales: &[KvScales]) -> Result<Self, DeviceError> {
        check_scales(&shape, scales)?;
        if shape.page_tokens == 0 || !shape.page_tokens.is_multiple_of(LANES) {
            return Err(DeviceError::Unsupported(format!(
                "KV pages of {} tokens: a multiple of {LANES} is needed",
                shape.page_tokens
            )));
        }
        check_head_dim(shape.head_dim)?;
        let elements = [2, shape.layers, shape.pages, shape.kv_heads, shape.head_dim]
            .into_iter()
            .try_fold(shape.page_tokens, |product: usize, factor| product.checked_mul(factor));
        Ok(Self { shape, data: KvData::zeroed(shape.dtype, elements)?, scales: scales.to_vec() })
    }

    /// The scales of a layer.
    pub(in crate::cpu) fn scales(&self, layer: usize) -> KvScales {
        self.scales.get(layer).copied().unwrap_or(KvScales::ONE)
    }

    /// The byte ranges of a page, layer by layer.
    pub(in crate::cpu) fn byte_ranges(&self, page: PageId) -> impl Iterator<Item = Range<usize>> + use<> {
        let shape = self.shape;
        let (layer_bytes, size) = (shape.page_bytes() / shape.layers.max(1), shape.dtype.bytes());
        (0..shape.layers).map(move |layer| {
            let start = Layout::new(&shape, layer).head(page, 0) * size;
            start..start + layer_bytes
        })
    }

    /// Checks that the pool has layer `layer`, and that the pool's heads match `shape`.
    pub(in crate::cpu) fn check(&self, layer: usize, shape: &AttentionShape) -> Result<(), DeviceError> {
        check_head_dim(shape.head_dim)?;
        let pool = &self.shape;
        let grouped = shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads);
        if layer < pool.layers
            && shape.kv_heads == pool.kv_heads
            && shape.head_dim == pool.head_dim
            && grouped
            && shape.window != Some(0)
        {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("layer {layer} with {shape:?} over a pool of {pool:?}")))
    }
}

/// Refuses scales of pages whose elements have none, scales of another number of layers, and scales that are no
/// factors.
fn check_scales(shape: &KvShape, scales: &[KvScales]) -> Result<(), DeviceError> {
    let is_factor = |scale: f32| scale.is_finite() && scale > 0.0;
    let fit = match shape.dtype {
        KvType::Full(_) => scales.is_empty(),
        KvType::Fp8(_) => scales.is_empty() || scales.len() == shape.layers,
    };
    if fit && scales.iter().all(|scales| is_factor(scales.key) && is_factor(scales.value)) {
        return Ok(());
    }
    Err(DeviceError::Misuse(format!("scales {scales:?} of {} layers in {}", shape.layers, shape.dtype)))
}

fn check_head_dim(head_dim: usize) -> Result<(), DeviceError> {
    if head_dim > 0 && head_dim.is_multiple_of(LANES) {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!("heads of {head_dim} elements: a multiple of {LANES} is needed")))
}

/// Computes the indices, among the pool's elements, of one layer's keys and values.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Layout {
    pub(in crate::cpu) page_tokens: usize,
    head_dim: usize,
    kv_heads: usize,
    layer_start: usize,
}

impl Layout {
    pub(in crate::cpu) fn new(shape: &KvShape, layer: usize) -> Self {
        let KvShape { kv_heads, head_dim, page_tokens, pages, .. } = *shape;
        let layer_start = layer * pages * kv_heads * 2 * page_tokens * head_dim;
        Self { page_tokens, head_dim, kv_heads, layer_start }
    }

    /// Index of the first element of a head in a page.
    fn head(&self, page: PageId, head: usize) -> usize {
        self.layer_start + (page.0 as usize * self.kv_heads + head) * 2 * self.page_tokens * self.head_dim
    }

    /// Index of the first element of the panel of keys that holds token position `position`.
    #[inline(always)]
    pub(in crate::cpu) fn key_panel(&self, table: &[PageId], head: usize, position: usize) -> usize {
        let page = table[position / self.page_tokens];
        self.head(page, head) + position % self.page_tokens / LANES * LANES * self.head_dim
    }

    /// Index of the first element of the panels of values that hold token position `position`. Each panel is
    /// [`VALUE_PANEL`] elements long.
    #[inline(always)]
    pub(in crate::cpu) fn value_panels(&self, table: &[PageId], head: usize, position: usize) -> usize {
        self.key_panel(table, head, position) + self.page_tokens * self.head_dim
    }
}
