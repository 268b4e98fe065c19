//! The attention sublayers: the layers' compressors and indexers, and the attention over windows and entries.

use tutti_kernels::{
    AttendedEntries, Compress, CompressorShape, Device, DeviceError, GroupedBuffers, GroupedLinear, Indexer,
    IndexerShape, Linear, Norm, RopeFrequencies, Rotary, RotateTails, StoreWindow, TailNorm, WindowAttention,
    WindowShape,
};

use super::{
    config::{Config, LayerKind},
    weights::{AttentionWeights, Compressor, IndexerWeights},
};
use crate::{DecoderDevice, decoder::LayerStep};

/// Index of the slot plane with the windows.
const WINDOW: usize = 0;

/// Shapes and buffers of the attention sublayers.
pub(super) struct Attention<D: Device> {
    shape: WindowShape,
    /// Per layer, its kind and its index among the layers of this kind.
    kinds: Vec<(LayerKind, usize)>,
    /// Rotation of sliding layers.
    plain: Rotation<D>,
    /// Rotation of layers with entries.
    compressed: Rotation<D>,
    sparse: Option<Sparse<D>>,
    heavy: Option<Entries<D>>,
    /// Latent vector of queries, `[T, q_rank]`.
    latent: D::Tensor,
    /// Queries, `[T, heads * head_dim]`.
    q: D::Tensor,
    /// Keys, `[T, head_dim]`.
    kv: D::Tensor,
    /// Output of the attention, `[T, heads * head_dim]`.
    pub attended: D::Tensor,
    groups: GroupedBuffers<D::Tensor>,
    /// Outputs of the groups, `[T, groups * group_width]`.
    grouped: D::Tensor,
    /// Output of the sublayer, `[T, hidden]`.
    pub out: D::Tensor,
}

/// Frequencies, and the angles of a step's tokens, `[T, rotated elements of a head]`.
struct Rotation<D: Device> {
    rope: RopeFrequencies,
    angles: D::Tensor,
}

/// A compressor's entries: the indices of the planes of entries and states, and a buffer for the projections of tokens,
/// `[T, shape.projected()]`.
struct Entries<D: Device> {
    shape: CompressorShape,
    entries: usize,
    states: usize,
    projected: D::Tensor,
}

/// The entries of layers with an indexer.
struct Sparse<D: Device> {
    entries: Entries<D>,
    /// Entries of the indexer.
    keys: Entries<D>,
    shape: IndexerShape,
    /// Queries of the indexer, `[T, shape.heads * shape.head_dim]`.
    q: D::Tensor,
    /// Weights of the indexer's heads, `[T, shape.heads]`.
    weights: D::Tensor,
}

impl<D: DecoderDevice> Attention<D> {
    /// Allocates the buffers for steps of `tokens` tokens. `config` is a rank's shard.
    pub fn allocate(config: &Config, tokens: usize, device: &mut D) -> Result<Self, DeviceError> {
        let (shape, groups) = (config.window_shape(), config.groups);
        let (q, dim, group_width) = (shape.heads * shape.head_dim, shape.head_dim, config.group_width);
        let [plain, compressed] = &config.ropes;
        // The indices follow the order of the planes in the declaration.
        let (mut entries, mut states) = (0, WINDOW + 1);
        let mut next = |shape: CompressorShape, device: &mut D| {
            let projected = device.tensor(tokens, shape.projected())?;
            let planes = Entries { shape, entries, states, projected };
            (entries, states) = (entries + 1, states + 1);
            Ok::<_, DeviceError>(planes)
        };
        let has = |kind| config.compressor(kind).filter(|_| config.count(kind) > 0);
        let sparse = match has(LayerKind::Sparse) {
            Some(shape) => {
                let indexer = config.indexer;
                Some(Sparse {
                    entries: next(shape, device)?,
                    keys: next(config.index_compressor(), device)?,
                    shape: indexer,
                    q: device.tensor(tokens, indexer.heads * indexer.head_dim)?,
                    weights: device.tensor(tokens, indexer.heads)?,
                })
            }
            None => None,
        };
        let heavy = match has(LayerKind::Heavy) {
            Some(shape) => Some(next(shape, device)?),
            None => None,
        };
        let mut counts = [0; 3];
        let of_kind = |&kind: &LayerKind| {
            let count = &mut counts[kind as usize];
            *count += 1;
            (kind, *count - 1)
        };
        Ok(Self {
            shape,
            kinds: config.layers.iter().map(of_kind).collect(),
            plain: Rotation::allocate(plain, tokens, device)?,
            compressed: Rotation::allocate(compressed, tokens, device)?,
            sparse,
            heavy,
            latent: device.tensor(tokens, config.q_rank)?,
            q: device.tensor(tokens, q)?,
            kv: device.tensor(tokens, dim)?,
            attended: device.tensor(tokens, q)?,
            groups: GroupedBuffers {
                inputs: device.tensor(groups * tokens, q / groups)?,
                outputs: device.tensor(groups * tokens, group_width)?,
            },
            grouped: device.tensor(tokens, groups * group_width)?,
            out: device.tensor(tokens, config.text.hidden_size)?,
        })
    }

    /// Computes the angles of the step's tokens.
    pub fn begin(&mut self, device: &mut D) -> Result<(), DeviceError> {
        for Rotation { rope, angles } in [&mut self.plain, &mut self.compressed] {
            device.rope_angles(rope, angles)?;
        }
        Ok(())
    }

    /// Computes the heads' outputs of a layer in [`Self::attended`], from its input `x`. If `is_attended` is false,
    /// only writes the layer's entries, states and window.
    pub fn run(
        &mut self,
        step: &mut LayerStep<'_, D>,
        (x, norm): (&D::Tensor, Norm<'_, D::Vector>),
        (weights, layer): (&AttentionWeights<D>, usize),
        is_attended: bool,
    ) -> Result<(), DeviceError> {
        let Self { shape, kinds, plain, compressed, sparse, heavy, latent, q, kv, attended, .. } = self;
        let (shape, eps, (kind, of_kind)) = (*shape, norm.eps, kinds[layer]);
        let (head_dim, device) = (shape.head_dim, &mut *step.device);
        let input = Normed { x, weight: norm.weight, eps };
        let Rotation { rope, angles } = if kind == LayerKind::Sliding { plain } else { compressed };
        let (rope, angles) = (&*rope, &*angles);

        // The entries come first, because a token that closes a window sees the window's entry.
        let own = match kind {
            LayerKind::Sliding => None,
            LayerKind::Sparse => sparse.as_mut().map(|sparse| &mut sparse.entries),
            LayerKind::Heavy => heavy.as_mut(),
        };
        let mut compressed = None;
        if let (Some(own), Some(compressor)) = (own, &weights.compressor) {
            own.write(device, step.planes, input, (compressor, rope), of_kind)?;
            compressed = Some(AttendedEntries { entries: own.entries, layer: of_kind, indexer: None });
        }
        if let (Some(Sparse { keys, .. }), Some(indexer)) = (sparse.as_mut(), &weights.indexer) {
            keys.write(device, step.planes, input, (&indexer.compressor, rope), of_kind)?;
        }

        device.linear(input.times(&weights.kv), kv)?;
        device.rotate_tails(RotateTails {
            x: kv,
            head_dim,
            norm: TailNorm::Weighted(Norm { weight: &weights.kv_norm, eps }),
            rotary: Rotary { angles },
            inverse: false,
        })?;
        if is_attended {
            device.linear(input.times(&weights.q_a), latent)?;
            let latent = Normed { x: latent, weight: &weights.q_norm, eps };
            device.linear(latent.times(&weights.q_b), q)?;
            device.rotate_tails(RotateTails {
                x: q,
                head_dim,
                norm: TailNorm::Unweighted { eps },
                rotary: Rotary { angles },
                inverse: false,
            })?;
            if let (Some(sparse), Some(indexer), Some(entries)) =
                (sparse.as_mut(), &weights.indexer, compressed.as_mut())
            {
                entries.indexer = Some(sparse.queries(device, (input, latent), indexer, angles)?);
            }
            let attention = WindowAttention {
                q,
                kv,
                shape,
                sinks: &weights.sinks,
                planes: step.planes,
                window: WINDOW,
                layer,
                compressed,
            };
            device.window_attention(attention, attended)?;
            device.rotate_tails(RotateTails {
                x: attended,
                head_dim,
                norm: TailNorm::None,
                rotary: Rotary { angles },
                inverse: true,
            })?;
        }
        let planes = &mut *step.planes;
        device.store_window(StoreWindow { kv, shape, planes, window: WINDOW, layer })
    }

    /// Computes the output of the sublayer from [`Self::attended`], summed over all ranks.
    pub fn project(
        &mut self,
        step: &mut LayerStep<'_, D>,
        weights: &AttentionWeights<D>,
    ) -> Result<(), DeviceError> {
        let Self { attended, groups, grouped, out, .. } = self;
        let linear = GroupedLinear { x: attended, weights: &weights.o_a, buffers: groups };
        step.device.grouped_linear(linear, grouped)?;
        step.device.linear(Linear::plain(grouped, &weights.o_b), out)?;
        step.sum(out)
    }
}

/// A tensor with the norm of its rows.
struct Normed<'a, D: Device> {
    x: &'a D::Tensor,
    weight: &'a D::Vector,
    eps: f32,
}

impl<D: Device> Clone for Normed<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Normed<'_, D> {}

impl<'a, D: Device> Normed<'a, D> {
    /// Returns the operands of the product with a matrix.
    fn times(self, weight: &'a D::Matrix) -> Linear<'a, D::Tensor, D::Matrix, D::Vector> {
        let Self { x, weight: norm, eps } = self;
        Linear { x, norm: Some(Norm { weight: norm, eps }), weight, bias: None }
    }
}

impl<D: DecoderDevice> Rotation<D> {
    fn allocate(rope: &RopeFrequencies, tokens: usize, device: &mut D) -> Result<Self, DeviceError> {
        let angles = device.tensor(tokens, 2 * rope.inverse.len())?;
        Ok(Self { rope: rope.clone(), angles })
    }
}

impl<D: DecoderDevice> Entries<D> {
    /// Adds the step's tokens to the states of a layer, and writes the entries that they close.
    fn write(
        &mut self,
        device: &mut D,
        planes: &mut D::Planes,
        x: Normed<'_, D>,
        (weights, rope): (&Compressor<D>, &RopeFrequencies),
        layer: usize,
    ) -> Result<(), DeviceError> {
        let Self { shape, entries, states, projected } = self;
        device.linear(x.times(&weights.projection), projected)?;
        device.compress(Compress {
            projected,
            shape: *shape,
            offsets: &weights.offsets,
            norm: Norm { weight: &weights.norm, eps: x.eps },
            rope,
            planes,
            entries: *entries,
            states: *states,
            layer,
        })
    }
}

impl<D: DecoderDevice> Sparse<D> {
    /// Computes the indexer's queries and the weights of its heads, from the layer's input and the latent vector.
    fn queries(
        &mut self,
        device: &mut D,
        (input, latent): (Normed<'_, D>, Normed<'_, D>),
        weights: &IndexerWeights<D>,
        angles: &D::Tensor,
    ) -> Result<Indexer<'_, D::Tensor>, DeviceError> {
        let Self { keys, shape, q, weights: of_heads, .. } = self;
        device.linear(latent.times(&weights.q_b), q)?;
        device.rotate_tails(RotateTails {
            x: q,
            head_dim: shape.head_dim,
            norm: TailNorm::None,
            rotary: Rotary { angles },
            inverse: false,
        })?;
        device.linear(input.times(&weights.weights), of_heads)?;
        Ok(Indexer { queries: q, weights: of_heads, shape: *shape, entries: keys.entries })
    }
}
