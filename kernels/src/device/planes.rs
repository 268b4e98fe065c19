//! The shapes of a model's planes on a device.

use std::fmt;

use crate::WeightType;

/// Storage type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Elements of this type.
    Full(WeightType),
    /// Floats of eight bits ([`e4m3`](crate::e4m3)) with a scale for the keys of each layer and one for its values.
    /// Attention has the arithmetic that it has for elements of this type, or one that is more precise.
    Fp8(WeightType),
}

impl KvType {
    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Full(dtype) => dtype.bytes(),
            Self::Fp8(_) => 1,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(WeightType::F32) => "f32",
            Self::Full(WeightType::F16) => "f16",
            Self::Full(WeightType::Bf16) => "bf16",
            Self::Fp8(_) => "fp8",
        })
    }
}

/// The scales of a layer's keys and values in [`KvType::Fp8`]. An element stands for its own value times the scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvScales {
    /// Scale of keys: positive and finite.
    pub key: f32,
    /// Scale of values: positive and finite.
    pub value: f32,
}

impl KvScales {
    /// The scales of elements that stand for their own values.
    pub const ONE: Self = Self { key: 1.0, value: 1.0 };
}

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
    pub dtype: KvType,
}

impl KvShape {
    /// Bytes per page: keys and values of all layers.
    pub fn page_bytes(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * self.page_tokens * self.dtype.bytes()
    }
}

/// The shape of a paged plane of compressed entries, over all its layers. Each entry stands for several tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntriesShape {
    /// Number of layers with entries.
    pub layers: usize,
    /// Elements per entry.
    pub width: usize,
    /// Number of tokens per entry. Divides `page_tokens`.
    pub ratio: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Number of pages, including the null page.
    pub pages: usize,
    /// Storage type of the entries.
    pub dtype: WeightType,
}

impl EntriesShape {
    /// Bytes per page: the entries of all layers.
    pub fn page_bytes(&self) -> usize {
        self.layers * self.page_tokens / self.ratio * self.width * self.dtype.bytes()
    }
}

/// The shapes of all planes of a model on one rank. The default is a model without planes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanesShape {
    /// The plane of keys and values; `None` in a model without one.
    pub kv: Option<KvShape>,
    /// The scales of each layer of a plane in [`KvType::Fp8`]. Empty if all are 1.
    pub kv_scales: Vec<KvScales>,
    /// The planes of compressed entries, with the same pages as keys and values.
    pub entries: Vec<EntriesShape>,
    /// Bytes per slot of each slot plane, in order. Empty in a model without slot planes.
    pub slot_bytes: Vec<usize>,
    /// Number of slots of each slot plane, including the null slot.
    pub slots: usize,
}
