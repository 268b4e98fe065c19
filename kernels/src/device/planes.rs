//! The shapes of a model's planes on a device.

use crate::WeightType;

/// The shape of a paged KV plane, over all its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Number of layers with keys and values.
    pub layers: usize,
    /// Heads per layer.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Number of pages, including the null page.
    pub pages: usize,
    /// Storage type of keys and values.
    pub dtype: WeightType,
}

impl KvShape {
    /// Bytes per page: keys and values of all layers.
    pub fn page_bytes(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * self.page_tokens * self.dtype.bytes()
    }
}

/// The shapes of all planes of a model on one rank. The default is a model without planes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanesShape {
    /// The plane of keys and values; `None` in a model without one.
    pub kv: Option<KvShape>,
    /// Bytes per slot of each slot plane, in order. Empty in a model without slot planes.
    pub slot_bytes: Vec<usize>,
    /// Number of slots of each slot plane, including the null slot.
    pub slots: usize,
}
