//! A decoder's planes: their shapes on the device, their declaration and their layout on the wire.

use tutti_kernels::{
    DeviceError, EntriesShape, KvScales, KvShape, KvType, PlanesShape, WeightType, collective::GroupRank,
};
use tutti_proto::cluster::v1::ElementType;
use tutti_proto::declaration::{DeclarationError, ModelDeclaration, Plane, PlaneKind};

use super::TextShape;
use crate::{
    KvCacheDtype, LoadError, LoadOptions, PageLayout, PlaneLayout, PlaneStorage, Section,
    thinker::{self, KV_PLANE},
    weights::{Source, kv_scales, share},
};

/// Paged keys and values of the layers that have attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvPlane {
    /// Number of layers with keys and values.
    pub layers: usize,
    /// Heads per layer, which the ranks of a group divide among themselves.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

/// A paged plane of compressed entries. Every rank of a group holds all entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryPlane {
    /// Name in the declaration.
    pub name: &'static str,
    /// Number of layers with entries.
    pub layers: usize,
    /// Elements per entry.
    pub width: usize,
    /// Number of tokens per entry. Divides the tokens of a page.
    pub ratio: usize,
}

/// A plane with state of a fixed size per request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotPlane {
    /// Name in the declaration.
    pub name: &'static str,
    /// Number of layers with state. A slot holds the states of all these layers end to end.
    pub layers: usize,
    /// Units per layer, which the ranks of a group divide among themselves.
    pub units: usize,
    /// Bytes per unit.
    pub unit_bytes: usize,
}

/// The planes of one rank.
pub(crate) struct RankPlanes {
    kv: Option<KvPlane>,
    entries: Vec<EntryPlane>,
    /// Storage type of the entries.
    entry_type: WeightType,
    slots: Vec<SlotPlane>,
    page_tokens: usize,
    /// Type of keys and values.
    kv_type: KvType,
    /// The scales of each layer of keys and values in fp8. Empty if all are 1.
    kv_scales: Vec<KvScales>,
    group_rank: GroupRank,
}

impl RankPlanes {
    /// Returns the planes that a model has with these options. `weight_type` is the type of its embedding. Refuses
    /// scales of keys and values that are not for the type that the options ask for.
    pub fn new(
        shape: &TextShape,
        source: &Source,
        options: &LoadOptions,
        weight_type: WeightType,
        group_rank: GroupRank,
    ) -> Result<Self, LoadError> {
        let kv_type = match options.kv_cache_dtype {
            KvCacheDtype::Auto => KvType::Full(weight_type),
            KvCacheDtype::Bf16 => KvType::Full(WeightType::Bf16),
            KvCacheDtype::Fp8 => KvType::Fp8(weight_type),
        };
        let kv_scales = match kv_type {
            KvType::Full(_) => Vec::new(),
            KvType::Fp8(_) => kv_scales::read(source, &shape.attention_modules, options)?,
        };
        let entry_type = match kv_type {
            KvType::Full(dtype) => dtype,
            KvType::Fp8(_) if shape.entries.is_empty() => weight_type,
            KvType::Fp8(_) => {
                let problem = "kv_cache_dtype fp8 for compressed entries".to_owned();
                return Err(DeviceError::Unsupported(problem).into());
            }
        };
        let (entries, slots) = (shape.entries.clone(), shape.slots.clone());
        // A model without paged planes has no pages for which the family's number would hold.
        let is_paged = shape.kv.is_some() || !entries.is_empty();
        let page_tokens = shape.page_tokens.filter(|_| is_paged).unwrap_or(options.page_tokens);
        Ok(Self { kv: shape.kv, entries, entry_type, slots, page_tokens, kv_type, kv_scales, group_rank })
    }

    /// Type of keys and values.
    pub fn kv_type(&self) -> KvType {
        self.kv_type
    }

    fn kv_shape(&self, pages: usize) -> Option<KvShape> {
        let kv_heads = |heads| share(heads, self.group_rank).len();
        self.kv.map(|KvPlane { layers, heads, head_dim }| KvShape {
            layers,
            kv_heads: kv_heads(heads),
            head_dim,
            page_tokens: self.page_tokens,
            pages,
            dtype: self.kv_type,
        })
    }

    fn entry_shapes(&self, pages: usize) -> impl Iterator<Item = EntriesShape> {
        let Self { page_tokens, entry_type: dtype, .. } = *self;
        let shape = move |&EntryPlane { layers, width, ratio, .. }: &EntryPlane| EntriesShape {
            layers,
            width,
            ratio,
            page_tokens,
            pages,
            dtype,
        };
        self.entries.iter().map(shape)
    }

    /// Returns, for each plane, the bytes of a slot that this rank holds.
    pub fn slot_bytes(&self) -> impl Iterator<Item = usize> {
        let rank = self.group_rank;
        self.slots.iter().map(move |plane| plane.layers * share(plane.units, rank).len() * plane.unit_bytes)
    }

    /// Returns the bytes per page on this rank.
    pub fn page_bytes(&self) -> usize {
        let entries: usize = self.entry_shapes(0).map(|shape| shape.page_bytes()).sum();
        self.kv_shape(0).map_or(0, |kv| kv.page_bytes()) + entries
    }

    /// Returns the shapes of this rank's planes with `pages` pages and `slots` slots.
    pub fn shape(&self, pages: usize, slots: usize) -> PlanesShape {
        let (kv, kv_scales) = (self.kv_shape(pages), self.kv_scales.clone());
        PlanesShape {
            kv,
            kv_scales,
            entries: self.entry_shapes(pages).collect(),
            slot_bytes: self.slot_bytes().collect(),
            slots,
        }
    }

    /// Returns the declaration of a text model with this rank's planes.
    pub fn declaration(&self) -> Result<ModelDeclaration, DeclarationError> {
        let page_tokens = self.page_tokens;
        let kv = self.kv_shape(0).map(|kv| {
            let bytes_per_entry = (kv.page_bytes() / page_tokens.max(1)) as u64;
            let (page_tokens, element_type) = (page_tokens as u32, element_type(self.kv_type));
            let kind = PlaneKind::Paged { page_tokens, ratio: 1, bytes_per_entry, element_type };
            Plane { name: KV_PLANE.into(), kind }
        });
        let entries = self.entries.iter().zip(self.entry_shapes(0)).map(|(plane, shape)| {
            let bytes_per_entry = (shape.layers * shape.width * shape.dtype.bytes()) as u64;
            let (page_tokens, ratio) = (page_tokens as u32, shape.ratio as u32);
            let element_type = element_type(KvType::Full(shape.dtype));
            let kind = PlaneKind::Paged { page_tokens, ratio, bytes_per_entry, element_type };
            Plane { name: plane.name.into(), kind }
        });
        let slots = self.slots.iter().zip(self.slot_bytes()).map(|(plane, bytes)| Plane {
            name: plane.name.into(),
            kind: PlaneKind::Slot { bytes: bytes as u64 },
        });
        thinker::with_planes(kv.into_iter().chain(entries).chain(slots).collect())
    }

    /// Returns the layout of pages and slots on the wire, which is equal for groups of any size. `kv_format` names the
    /// device's layout of keys and values.
    pub fn layout(&self, kv_format: &str) -> PageLayout {
        let Self { page_tokens, kv_type, .. } = *self;
        let kv = self.kv.map(|KvPlane { layers, heads, head_dim }| {
            let unit_bytes = 2 * page_tokens * head_dim * kv_type.bytes();
            PlaneLayout {
                name: KV_PLANE.into(),
                storage: PlaneStorage::Pages { ratio: 1 },
                sections: vec![Section { units: heads, unit_bytes }; layers],
                format: match kv_type {
                    KvType::Full(dtype) => format!("{dtype:?} heads of {head_dim}, {kv_format}"),
                    KvType::Fp8(_) => {
                        let scales = self.scale_bits();
                        format!("fp8 heads of {head_dim}, scales [{scales}], {kv_format}")
                    }
                },
            }
        });
        let entries = self.entries.iter().map(|&EntryPlane { name, layers, width, ratio }| PlaneLayout {
            name: name.into(),
            storage: PlaneStorage::Pages { ratio },
            sections: vec![
                Section {
                    units: 1,
                    unit_bytes: page_tokens / ratio * width * self.entry_type.bytes()
                };
                layers
            ],
            format: format!("{:?} entries of {width}", self.entry_type),
        });
        let slots = self.slots.iter().map(|&SlotPlane { name, layers, units, unit_bytes }| PlaneLayout {
            name: name.into(),
            storage: PlaneStorage::Slot,
            sections: vec![Section { units, unit_bytes }; layers],
            format: format!("units of {unit_bytes} bytes"),
        });
        PageLayout { page_tokens, planes: kv.into_iter().chain(entries).chain(slots).collect() }
    }

    /// The bits of all scales, as text.
    fn scale_bits(&self) -> String {
        let bits = |scales: &KvScales| format!("{:x} {:x}", scales.key.to_bits(), scales.value.to_bits());
        self.kv_scales.iter().map(bits).collect::<Vec<_>>().join(", ")
    }
}

/// Returns the name of a type in declarations.
fn element_type(kv_type: KvType) -> ElementType {
    match kv_type {
        KvType::Full(WeightType::F32) => ElementType::F32,
        KvType::Full(WeightType::F16) => ElementType::F16,
        KvType::Full(WeightType::Bf16) => ElementType::Bf16,
        KvType::Fp8(_) => ElementType::Fp8,
    }
}
