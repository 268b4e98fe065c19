//! The planes of a model on the GPU.
//!
//! The pages of a layer have the layout `[page][kv head][keys, values][token][element]`. All pages of a layer precede
//! those of the next one.

use std::sync::Arc;

use super::context::Gpu;
use super::memory::{DeviceBuffer, DevicePointer, PinnedBuffer};
use crate::{AttentionShape, DeviceError, KvScales, KvShape, KvType, PageId, PlanesShape, SlotCopy, SlotId};

/// The name of the layout of pages. Workers exchange pages only if their layouts have the same name.
pub(super) const FORMAT: &str = "cuda: rows of keys, then rows of values";
/// Number of elements that the kernels read at once. Head sizes are multiples of it.
const HEAD_UNIT: usize = 16;
/// Largest head size that the kernels support.
const MAX_HEAD: usize = 256;

/// Pages of keys and values, and slots.
pub struct Planes {
    gpu: Arc<Gpu>,
    kv: Option<(KvShape, DeviceBuffer)>,
    /// The scales of each layer of keys and values in fp8. Empty if all are 1.
    kv_scales: Vec<KvScales>,
    slots: Vec<SlotPlane>,
    /// Number of slots, including the null slot.
    pub(super) slot_count: usize,
}

/// The pages of one layer.
#[derive(Clone, Copy)]
pub(super) struct LayerPages {
    pub(super) at: DevicePointer<u8>,
    pub(super) pool: KvShape,
    pub(super) scales: KvScales,
}

struct SlotPlane {
    bytes: usize,
    /// Distance in bytes between the starts of successive slots.
    stride: usize,
    data: DeviceBuffer,
}

impl Planes {
    pub(super) fn new(gpu: &Arc<Gpu>, shape: &PlanesShape) -> Result<Self, DeviceError> {
        if let Some(entries) = shape.entries.first() {
            return Err(DeviceError::Unsupported(format!("planes of compressed entries: {entries:?}")));
        }
        let kv = shape.kv.map(|kv| {
            check_head(kv.head_dim)?;
            let scales = shape.kv_scales.len();
            if scales != 0 && (scales != kv.layers || matches!(kv.dtype, KvType::Full(_))) {
                let (layers, dtype) = (kv.layers, kv.dtype);
                return Err(DeviceError::Misuse(format!("{scales} scales of {layers} layers in {dtype}")));
            }
            if kv.page_tokens == 0 {
                return Err(DeviceError::Unsupported("KV pages without tokens".to_owned()));
            }
            let bytes = kv.page_bytes().checked_mul(kv.pages);
            Ok((kv, DeviceBuffer::zeroed(gpu, bytes, "the KV pool")?))
        });
        let slot_plane = |&bytes: &usize| {
            let stride = bytes.next_multiple_of(256);
            let data = DeviceBuffer::zeroed(gpu, stride.checked_mul(shape.slots), "a slot plane")?;
            Ok::<_, DeviceError>(SlotPlane { bytes, stride, data })
        };
        Ok(Self {
            gpu: gpu.clone(),
            kv: kv.transpose()?,
            kv_scales: shape.kv_scales.clone(),
            slots: shape.slot_bytes.iter().map(slot_plane).collect::<Result<_, _>>()?,
            slot_count: shape.slots,
        })
    }

    /// The shape of the pages; `None` in a model without them.
    pub(super) fn kv_shape(&self) -> Option<KvShape> {
        self.kv.as_ref().map(|(shape, _)| *shape)
    }

    /// Returns the pages of a layer. Checks that the pool has the layer, and heads as in `shape`.
    pub(super) fn layer(&self, layer: usize, shape: &AttentionShape) -> Result<LayerPages, DeviceError> {
        check_head(shape.head_dim)?;
        let (pool, data) = self.kv()?;
        let grouped = shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads);
        let alike = shape.kv_heads == pool.kv_heads && shape.head_dim == pool.head_dim;
        if layer < pool.layers && alike && grouped && shape.window != Some(0) {
            return Ok(LayerPages {
                at: data.at().add_bytes(layer * layer_bytes(pool) * pool.pages),
                pool: *pool,
                scales: self.kv_scales.get(layer).copied().unwrap_or(KvScales::ONE),
            });
        }
        Err(DeviceError::Misuse(format!("layer {layer} with {shape:?} over a pool of {pool:?}")))
    }

    fn kv(&self) -> Result<(&KvShape, &DeviceBuffer), DeviceError> {
        let kv = self.kv.as_ref().map(|(shape, data)| (shape, data));
        kv.ok_or_else(|| DeviceError::Misuse("a model without pages".to_owned()))
    }

    /// Appends the bytes of pages to `out`, page by page and layer by layer. Waits for the GPU.
    pub(super) fn read_pages(&self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let (shape, data) = self.kv()?;
        check_pages(shape, pages)?;
        let bytes = layer_bytes(shape);
        let mut host = PinnedBuffer::new(&self.gpu, pages.len() * shape.page_bytes())?;
        for (index, start) in page_starts(shape, pages).enumerate() {
            data.copy_out(start, bytes, &mut host, index * bytes)?;
        }
        self.gpu.synchronize()?;
        out.extend_from_slice(host.bytes());
        Ok(())
    }

    /// Overwrites pages with bytes that [`read_pages`](Self::read_pages) has read from as many pages.
    pub(super) fn write_pages(&mut self, pages: &[PageId], from: &[u8]) -> Result<(), DeviceError> {
        let (shape, data) = self.kv()?;
        check_pages(shape, pages)?;
        if from.len() != pages.len() * shape.page_bytes() {
            let wanted = pages.len() * shape.page_bytes();
            return Err(DeviceError::Misuse(format!("{} bytes for pages of {wanted}", from.len())));
        }
        let bytes = layer_bytes(shape);
        let mut host = PinnedBuffer::new(&self.gpu, bytes)?;
        for (start, from) in page_starts(shape, pages).zip(from.chunks_exact(bytes.max(1))) {
            host.bytes_mut().copy_from_slice(from);
            data.copy_in(start, &host, bytes)?;
            self.gpu.synchronize()?;
        }
        Ok(())
    }

    /// True in a model without slot planes.
    pub(super) fn has_no_slots(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns an error for copies in a model without slot planes, for slots that do not exist, and for the null slot
    /// as target.
    pub(super) fn check_copies(&self, copies: &[SlotCopy]) -> Result<(), DeviceError> {
        for copy in copies {
            if self.slots.is_empty() || copy.to == SlotId::NULL {
                let planes = self.slots.len();
                return Err(DeviceError::Misuse(format!("{copy:?} in {planes} slot planes")));
            }
            self.check_slot(copy.from)?;
            self.check_slot(copy.to)?;
        }
        Ok(())
    }

    /// Returns an error for a slot that does not exist.
    pub(super) fn check_slot(&self, slot: SlotId) -> Result<(), DeviceError> {
        if (slot.0 as usize) < self.slot_count {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("slot {} of {}", slot.0, self.slot_count)))
    }

    /// Enqueues one copy, which [`check_copies`](Self::check_copies) has accepted.
    pub(super) fn copy(&mut self, copy: SlotCopy) -> Result<(), DeviceError> {
        for plane in &self.slots {
            let (from, to) = (copy.from.0 as usize * plane.stride, copy.to.0 as usize * plane.stride);
            match copy.from {
                SlotId::NULL => plane.data.fill_zeros(to, plane.bytes)?,
                _ if from == to => {}
                _ => plane.data.copy_from(to, &plane.data, from, plane.bytes)?,
            }
        }
        Ok(())
    }

    /// Returns the address of the bytes `start .. start + bytes` of the null slot in one plane, and the distance in
    /// bytes between successive slots.
    pub(super) fn states(
        &self,
        plane: usize,
        start: usize,
        bytes: usize,
    ) -> Result<(DevicePointer<u8>, u64), DeviceError> {
        match self.slots.get(plane) {
            Some(plane) if start + bytes <= plane.bytes => {
                Ok((plane.data.at().add_bytes(start), plane.stride as u64))
            }
            _ => Err(DeviceError::Misuse(format!("{bytes} bytes from {start} on in slot plane {plane}"))),
        }
    }

    /// Appends a slot's state to `out`, plane by plane. Waits for the GPU.
    pub(super) fn read_slot(&self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.check_state(slot)?;
        for plane in &self.slots {
            let mut host = PinnedBuffer::new(&self.gpu, plane.bytes)?;
            plane.data.copy_out(slot.0 as usize * plane.stride, plane.bytes, &mut host, 0)?;
            self.gpu.synchronize()?;
            out.extend_from_slice(host.bytes());
        }
        Ok(())
    }

    /// Overwrites a slot's state with bytes that [`read_slot`](Self::read_slot) has read.
    pub(super) fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.check_state(slot)?;
        let (wanted, got) = (self.slots.iter().map(|plane| plane.bytes).sum::<usize>(), data.len());
        if got != wanted {
            return Err(DeviceError::Misuse(format!("{got} bytes for a slot of {wanted}")));
        }
        let mut data = data;
        for plane in &self.slots {
            let (own, rest) = data.split_at(plane.bytes);
            let mut host = PinnedBuffer::new(&self.gpu, plane.bytes)?;
            host.bytes_mut().copy_from_slice(own);
            plane.data.copy_in(slot.0 as usize * plane.stride, &host, plane.bytes)?;
            data = rest;
        }
        Ok(())
    }

    /// Returns an error for the null slot, which has no state, and for a slot that does not exist.
    fn check_state(&self, slot: SlotId) -> Result<(), DeviceError> {
        if slot == SlotId::NULL {
            return Err(DeviceError::Misuse("the state of the null slot".to_owned()));
        }
        self.check_slot(slot)
    }
}

fn check_head(head_dim: usize) -> Result<(), DeviceError> {
    if head_dim > 0 && head_dim <= MAX_HEAD && head_dim.is_multiple_of(HEAD_UNIT) {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!(
        "heads of {head_dim} elements: a multiple of {HEAD_UNIT} up to {MAX_HEAD} is needed"
    )))
}

fn check_pages(shape: &KvShape, pages: &[PageId]) -> Result<(), DeviceError> {
    match pages.iter().find(|page| page.0 as usize >= shape.pages) {
        Some(page) => Err(DeviceError::Misuse(format!("page {} of a pool of {}", page.0, shape.pages))),
        None => Ok(()),
    }
}

/// Bytes per page of one layer.
fn layer_bytes(shape: &KvShape) -> usize {
    shape.page_bytes() / shape.layers.max(1)
}

/// Returns the index of the first byte of each page in each layer, page by page.
fn page_starts(shape: &KvShape, pages: &[PageId]) -> impl Iterator<Item = usize> {
    let (layers, count, bytes) = (shape.layers, shape.pages, layer_bytes(shape));
    pages.iter().flat_map(move |page| (0..layers).map(move |layer| (layer * count + page.0 as usize) * bytes))
}
