//! A layer with a window and compressed entries, its requests, and a device that runs steps of it.

use tutti_kernels::cpu::{CpuDevice, Isa, Planes, Tensor, Vector};
use tutti_kernels::{
    AttendedEntries, Compress, Compressed, CompressorShape, Device, DeviceError, EntriesShape, Indexer,
    IndexerShape, Norm, PageId, PlanesShape, RopeFrequencies, RowInputs, SlotCopy, SlotId, StepInputs,
    StoreWindow, WeightType, WindowAttention, WindowShape,
};

use crate::support::{Random, tensor};

const SLOTS: usize = 6;
pub const LAYERS: usize = 2;
/// The layer that runs. The other one keeps what it has.
const LAYER: usize = 1;
/// Number of pages: 24 for each slot, and the null page.
const PAGES: usize = 1 + 24 * (SLOTS - 1);
/// Largest number of tokens of a step.
const TOKENS: usize = 3200;
pub const EPS: f32 = 1e-6;

/// The sizes of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub heads: usize,
    pub head_dim: usize,
    /// Number of rotated elements of an entry, and of an entry of the indexer.
    pub rotated: usize,
    pub window: usize,
    pub dtype: WeightType,
    /// Ratio and parts of the compressor.
    pub compressor: Option<(usize, usize)>,
    pub indexer: Option<IndexerShape>,
    pub page_tokens: usize,
}

/// Weights of a compressor.
pub struct CompressorWeights {
    pub shape: CompressorShape,
    pub offsets: Vec<f32>,
    pub norm: Vec<f32>,
}

/// A layer: its sizes and its weights.
pub struct Layer {
    pub case: Case,
    pub sinks: Vec<f32>,
    /// The compressor of entries and that of the indexer, in the order of their planes.
    pub compressors: Vec<CompressorWeights>,
    pub rope: RopeFrequencies,
}

impl Layer {
    pub fn new(case: Case) -> Self {
        let mut random = Random::new(9);
        let widths = [Some(case.head_dim), case.indexer.map(|indexer| indexer.head_dim)];
        let compressors = case.compressor.into_iter().flat_map(|(ratio, parts)| {
            widths.into_iter().flatten().map(move |width| CompressorShape { ratio, width, parts })
        });
        let compressors: Vec<_> = compressors
            .map(|shape| CompressorWeights {
                shape,
                offsets: random.normals(shape.ratio * shape.parts * shape.width, 1.0),
                norm: random.normals(shape.width, 1.0),
            })
            .collect();
        let power = |i: usize| 1e2f32.powf(-2.0 * i as f32 / case.rotated as f32);
        Self {
            case,
            sinks: random.normals(case.heads, 1.5),
            compressors,
            rope: RopeFrequencies {
                inverse: (0..case.rotated / 2).map(power).collect(),
                scale: 1.0,
                axes: vec![],
            },
        }
    }

    pub fn window(&self) -> WindowShape {
        let Case { heads, head_dim, window, dtype, .. } = self.case;
        WindowShape { heads, head_dim, scale: (head_dim as f32).powf(-0.5), window, dtype }
    }

    /// Elements per entry of each plane.
    pub fn entry_widths(&self) -> Vec<usize> {
        self.compressors.iter().map(|compressor| compressor.shape.width).collect()
    }

    fn planes(&self) -> PlanesShape {
        let Case { dtype, page_tokens, .. } = self.case;
        let entries = self.compressors.iter().map(|CompressorWeights { shape, .. }| {
            let CompressorShape { ratio, width, .. } = *shape;
            EntriesShape { layers: LAYERS, width, ratio, page_tokens, pages: PAGES, dtype }
        });
        let states = self.compressors.iter().map(|compressor| compressor.shape.state_bytes());
        let slot_bytes =
            std::iter::once(self.window().ring_bytes()).chain(states).map(|bytes| LAYERS * bytes);
        PlanesShape {
            entries: entries.collect(),
            slot_bytes: slot_bytes.collect(),
            slots: SLOTS,
            ..PlanesShape::default()
        }
    }
}

/// A request: the operands of its tokens, which depend only on the layer and the seed, its pages and its slot.
pub struct Request {
    pub tokens: usize,
    pub slot: u32,
    pub pages: Vec<PageId>,
    pub q: Vec<f32>,
    pub kv: Vec<f32>,
    /// Projections of each compressor.
    pub projected: Vec<Vec<f32>>,
    pub index_queries: Vec<f32>,
    pub index_weights: Vec<f32>,
}

impl Request {
    pub fn new(layer: &Layer, tokens: usize, seed: u64, slot: u32) -> Self {
        let Case { heads, head_dim, page_tokens, indexer, .. } = layer.case;
        // Numbers do not depend on how many tokens there are.
        let normals = |kind: u64, width: usize| Random::new(10 * seed + kind).normals(tokens * width, 1.0);
        let (index_heads, index_dim) = indexer.map_or((0, 0), |indexer| (indexer.heads, indexer.head_dim));
        let pages = tokens.div_ceil(page_tokens);
        // Requests with different slots have different pages, which do not ascend.
        let own = (PAGES - 1) / (SLOTS - 1);
        let first = (slot.max(1) as usize - 1) * own + 1;
        assert!(pages <= own, "{tokens} tokens");
        let pages = (first..first + pages).rev().map(|page| PageId(page as u32)).collect();
        Self {
            tokens,
            slot,
            pages,
            q: normals(1, heads * head_dim),
            kv: normals(2, head_dim),
            projected: (3..)
                .zip(&layer.compressors)
                .map(|(kind, compressor)| normals(kind, compressor.shape.projected()))
                .collect(),
            index_queries: normals(5, index_heads * index_dim),
            index_weights: normals(6, index_heads),
        }
    }

    /// Adds a number to all gates of each token.
    pub fn shift_gates(&mut self, layer: &Layer, shift: impl Fn(usize) -> f32) {
        for (projected, CompressorWeights { shape, .. }) in self.projected.iter_mut().zip(&layer.compressors)
        {
            for (token, projected) in projected.chunks_mut(shape.projected()).enumerate() {
                projected[shape.parts * shape.width..].iter_mut().for_each(|gate| *gate += shift(token));
            }
        }
    }

    /// Sets the queries of the indexer, element by element.
    pub fn set_index_queries(&mut self, layer: &Layer, element: impl Fn(usize) -> f32) {
        let width = layer.case.indexer.map_or(1, |indexer| indexer.heads * indexer.head_dim);
        self.index_queries.iter_mut().enumerate().for_each(|(index, q)| *q = element(index % width));
    }

    /// Sets the weights of the indexer, head by head.
    pub fn set_index_weights(&mut self, layer: &Layer, weight: impl Fn(usize) -> f32) {
        let heads = layer.case.indexer.map_or(1, |indexer| indexer.heads);
        self.index_weights.iter_mut().enumerate().for_each(|(index, w)| *w = weight(index % heads));
    }
}

pub fn zero(slot: u32) -> SlotCopy {
    SlotCopy { from: SlotId::NULL, to: SlotId(slot) }
}

/// The operands of a layer's operations that a test may change.
pub struct Operations {
    pub layer: usize,
    pub entries: usize,
    pub states: usize,
    pub compressor: CompressorShape,
    pub rope: RopeFrequencies,
    pub window: WindowShape,
    pub indexer: IndexerShape,
}

/// A device with the weights of a layer. Its pages and slots hold NaN, so that the use of what was not stored shows.
pub struct Runner<'a> {
    device: CpuDevice,
    layer: &'a Layer,
    planes: Planes,
    sinks: Vector,
    /// Offsets and norm of each compressor.
    compressors: Vec<(Vector, Vector)>,
    out: Tensor,
}

/// A row of a step: a request, its first token and the number of its tokens.
pub type Row<'a> = (&'a Request, usize, usize);

impl<'a> Runner<'a> {
    pub fn new(mut device: CpuDevice, layer: &'a Layer) -> Self {
        let shape = layer.planes();
        let mut planes = device.planes(&shape).unwrap();
        let slot: usize = shape.slot_bytes.iter().sum();
        for index in 1..SLOTS as u32 {
            device.write_slot(&mut planes, SlotId(index), &vec![0xff; slot]).unwrap();
        }
        if !shape.entries.is_empty() {
            let pages: Vec<_> = (0..PAGES as u32).map(PageId).collect();
            let bytes: usize = shape.entries.iter().map(EntriesShape::page_bytes).sum();
            device.write_pages(&mut planes, &pages, &vec![0xff; PAGES * bytes]).unwrap();
        }
        let sinks = device.vector(&layer.sinks).unwrap();
        let compressors = layer.compressors.iter().map(|CompressorWeights { offsets, norm, .. }| {
            (device.vector(offsets).unwrap(), device.vector(norm).unwrap())
        });
        let compressors = compressors.collect();
        let out = device.tensor(TOKENS, layer.case.heads * layer.case.head_dim).unwrap();
        Self { device, layer, planes, sinks, compressors, out }
    }

    pub fn isa(&self) -> Isa {
        let name = self.device.describe();
        Isa::ALL.into_iter().find(|isa| name.contains(&format!(", {isa},"))).unwrap()
    }

    /// The operands that fit the layer.
    pub fn operations(&self) -> Operations {
        let layer = self.layer;
        let none = CompressorShape { ratio: 1, width: 1, parts: 1 };
        Operations {
            layer: LAYER,
            entries: 0,
            states: 1,
            compressor: layer.compressors.first().map_or(none, |compressor| compressor.shape),
            rope: layer.rope.clone(),
            window: layer.window(),
            indexer: layer.case.indexer.unwrap_or(IndexerShape { heads: 1, head_dim: 1, top_k: 1 }),
        }
    }

    /// Runs one step of rows, and returns the attention of each row's tokens.
    pub fn step(&mut self, rows: &[Row<'_>], copies: &[SlotCopy]) -> Vec<Vec<f32>> {
        let operations = self.operations();
        self.try_step(rows, copies, &operations).unwrap()
    }

    /// Does the same with operands that may not fit.
    pub fn try_step(
        &mut self,
        rows: &[Row<'_>],
        copies: &[SlotCopy],
        operations: &Operations,
    ) -> Result<Vec<Vec<f32>>, DeviceError> {
        let mut inputs = Vec::new();
        let mut tokens = 0;
        for (request, start, count) in rows {
            inputs.push(RowInputs {
                first_token: tokens,
                tokens: *count,
                start: *start,
                slot: SlotId(request.slot),
                continues: false,
                block_table: &request.pages,
            });
            tokens += count;
        }
        let (ids, positions) = (vec![0; tokens], vec![0.0; tokens]);
        let step = StepInputs {
            token_ids: &ids,
            positions: [&positions[..]; 3],
            rows: &inputs,
            copies,
            logit_rows: &[],
            shape: None,
        };
        let Self { device, layer, planes, sinks, compressors, out } = self;
        device.begin_step(&step, planes)?;
        let of = |device: &mut CpuDevice, values: &dyn Fn(&Request) -> &[f32]| {
            let all = rows.iter().flat_map(|(request, start, count)| {
                let values = values(request);
                let width = values.len() / request.tokens;
                values[start * width..(start + count) * width].to_vec()
            });
            let all: Vec<f32> = all.collect();
            let width = all.len() / tokens;
            tensor(device, width, &all)
        };
        let Operations { layer: index, entries, states, compressor, rope, window, indexer } = operations;
        for (plane, (offsets, norm)) in compressors.iter().enumerate() {
            let projected = of(device, &|request| &request.projected[plane]);
            let shape = if plane == 0 { *compressor } else { layer.compressors[plane].shape };
            let (entries, states) = if plane == 0 { (*entries, *states) } else { (plane, plane + 1) };
            device.compress(Compress {
                projected: &projected,
                shape,
                offsets,
                norm: Norm { weight: norm, eps: EPS },
                rope,
                planes,
                entries,
                states,
                layer: *index,
            })?;
        }
        let (q, kv) = (of(device, &|request| &request.q), of(device, &|request| &request.kv));
        let choice = layer.case.indexer.map(|_| {
            let queries = of(device, &|request| &request.index_queries);
            (queries, of(device, &|request| &request.index_weights))
        });
        let indexer = choice.as_ref().map(|(queries, weights)| Indexer {
            queries,
            weights,
            shape: *indexer,
            entries: 1,
        });
        let compressed =
            layer.case.compressor.map(|_| AttendedEntries { entries: *entries, layer: *index, indexer });
        let (shape, layer) = (*window, *index);
        device.window_attention(
            WindowAttention { q: &q, kv: &kv, shape, sinks, planes, window: 0, layer, compressed },
            out,
        )?;
        device.store_window(StoreWindow { kv: &kv, shape, planes, window: 0, layer })?;
        let width = self.layer.case.heads * self.layer.case.head_dim;
        let out = self.out.values();
        let of = |row: &RowInputs<'_>| out[row.first_token * width..][..row.tokens * width].to_vec();
        Ok(inputs.iter().map(of).collect())
    }

    /// Runs one step of (request, tokens) and appends the outputs of each request to `out`. The slots of requests that
    /// begin are set to zeros.
    pub fn advance(
        &mut self,
        requests: &[Request],
        rows: &[(usize, usize)],
        done: &mut [usize],
        out: &mut [Vec<f32>],
    ) {
        let inputs: Vec<Row<'_>> =
            rows.iter().map(|&(index, tokens)| (&requests[index], done[index], tokens)).collect();
        let begun = inputs.iter().filter(|(_, start, _)| *start == 0);
        let copies: Vec<_> = begun.map(|(request, ..)| zero(request.slot)).collect();
        for (own, &(index, tokens)) in self.step(&inputs, &copies).into_iter().zip(rows) {
            out[index].extend(own);
            done[index] += tokens;
        }
    }

    pub fn slot(&mut self, slot: u32) -> Vec<u8> {
        let mut state = Vec::new();
        self.device.read_slot(&self.planes, SlotId(slot), &mut state).unwrap();
        state
    }

    pub fn pages(&mut self, request: &Request) -> Vec<u8> {
        let mut pages = Vec::new();
        if !self.compressors.is_empty() {
            self.device.read_pages(&self.planes, &request.pages, &mut pages).unwrap();
        }
        pages
    }

    /// The bytes of all pages and slots.
    pub fn everything(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        for slot in 1..SLOTS as u32 {
            self.device.read_slot(&self.planes, SlotId(slot), &mut all).unwrap();
        }
        if !self.compressors.is_empty() {
            let pages: Vec<_> = (0..PAGES as u32).map(PageId).collect();
            self.device.read_pages(&self.planes, &pages, &mut all).unwrap();
        }
        all
    }

    /// Overwrites a request's slot and pages.
    pub fn restore(&mut self, request: &Request, slot: &[u8], pages: &[u8]) {
        self.device.write_slot(&mut self.planes, SlotId(request.slot), slot).unwrap();
        if !self.compressors.is_empty() {
            self.device.write_pages(&mut self.planes, &request.pages, pages).unwrap();
        }
    }

    /// The states of the first compressor in a slot.
    pub fn compressor_states(&mut self, slot: u32) -> Vec<f32> {
        let slot = self.slot(slot);
        let bytes = self.layer.compressors[0].shape.state_bytes();
        let first = LAYERS * self.layer.window().ring_bytes() + LAYER * bytes;
        slot[first..first + bytes].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    /// Byte ranges of the layer's entries of a plane in each of a request's pages, and the number of those entries.
    fn entry_bytes(&self, request: &Request, plane: usize) -> (Vec<usize>, usize) {
        let shape = self.layer.planes();
        let page: usize = shape.entries.iter().map(EntriesShape::page_bytes).sum();
        let before: usize = shape.entries[..plane].iter().map(EntriesShape::page_bytes).sum();
        let own = shape.entries[plane].page_bytes() / LAYERS;
        let starts = (0..request.pages.len()).map(|index| index * page + before + LAYER * own).collect();
        (starts, own)
    }

    /// The entries of a request's first `tokens` tokens.
    pub fn entries(&mut self, request: &Request, plane: usize, tokens: usize) -> Vec<f32> {
        let bytes = self.pages(request);
        let (starts, own) = self.entry_bytes(request, plane);
        let stored: Vec<u8> = starts.iter().flat_map(|&start| bytes[start..start + own].to_vec()).collect();
        let mut values: Vec<f32> = match self.layer.case.dtype {
            WeightType::F32 => stored.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
            WeightType::F16 => {
                stored.as_chunks().0.iter().map(|x| half::f16::from_le_bytes(*x).to_f32()).collect()
            }
            WeightType::Bf16 => {
                stored.as_chunks().0.iter().map(|x| half::bf16::from_le_bytes(*x).to_f32()).collect()
            }
        };
        let CompressorShape { ratio, width, .. } = self.layer.compressors[plane].shape;
        let count = tokens / ratio * width;
        // Entries that are not complete are not stored.
        assert!(values[count..].iter().all(|x| x.is_nan()), "an entry behind {tokens} tokens");
        values.truncate(count);
        values
    }

    /// Overwrites the entries of the indexer, which are in f32.
    pub fn set_index_keys(&mut self, request: &Request, element: impl Fn(usize, usize) -> f32) {
        let mut bytes = self.pages(request);
        let (starts, own) = self.entry_bytes(request, 1);
        let width = self.layer.compressors[1].shape.width;
        let mut index = 0;
        for start in starts {
            for to in bytes[start..start + own].as_chunks_mut().0 {
                *to = element(index / width, index % width).to_le_bytes();
                index += 1;
            }
        }
        self.device.write_pages(&mut self.planes, &request.pages, &bytes).unwrap();
    }
}
