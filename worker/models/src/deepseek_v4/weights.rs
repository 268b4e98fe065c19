//! The tensors of the layers of a DeepSeek-V4 checkpoint: their published names, their division among ranks, and their
//! fusion on a device.
//!
//! The ranks divide whole groups of heads of the output projection. The latent vector of queries, the head of keys, the
//! compressors, the indexer, the router and the hyper-connections are replicated: every rank has all of the streams,
//! and must choose the same entries and the same experts.

use tutti_kernels::{
    CompressorShape, Device, ExpertChoice, HyperShape, StreamProjection, WeightType, collective::GroupRank,
};

use super::config::{Config, LayerKind};
use crate::{
    LoadError,
    config::text::TextConfig,
    experts::{ExpertLayout, ExpertSpecs, ExpertWeights},
    weights::{Cut, Loader, Precision, Role, TensorSpec, share},
};

/// The tensors of one layer.
pub(crate) struct LayerSpecs {
    attention_streams: ProjectionSpecs,
    attention_norm: TensorSpec,
    attention: AttentionSpecs,
    mlp_streams: ProjectionSpecs,
    mlp_norm: TensorSpec,
    mlp: MlpSpecs,
    /// The projection behind all layers, in the specs of the last one.
    head: Option<ProjectionSpecs>,
}

/// The name of a layer's MLP in the checkpoint.
pub(super) fn mlp_name(layer: usize) -> String {
    format!("layers.{layer}.ffn")
}

/// The tensors of a projection of the streams.
struct ProjectionSpecs {
    weight: TensorSpec,
    base: TensorSpec,
    scale: TensorSpec,
}

/// The tensors of an attention sublayer.
struct AttentionSpecs {
    q_a: TensorSpec,
    q_norm: TensorSpec,
    q_b: TensorSpec,
    kv: TensorSpec,
    kv_norm: TensorSpec,
    sinks: TensorSpec,
    /// `None` in a sliding layer.
    compressor: Option<CompressorSpecs>,
    /// `None` in a layer that attends to all entries.
    indexer: Option<IndexerSpecs>,
    /// The matrices of the rank's groups.
    o_a: Vec<TensorSpec>,
    o_b: TensorSpec,
}

struct CompressorSpecs {
    /// k and gate.
    projections: [TensorSpec; 2],
    offsets: TensorSpec,
    norm: TensorSpec,
}

struct IndexerSpecs {
    compressor: CompressorSpecs,
    q_b: TensorSpec,
    weights: TensorSpec,
}

/// The tensors of an MLP.
struct MlpSpecs {
    experts: ExpertSpecs,
    /// A table of experts by token id, or the bias of the choice.
    choice: TensorSpec,
    /// Number of experts, if `choice` is a table of them.
    table_of: Option<usize>,
    gate_up: [TensorSpec; 2],
    down: TensorSpec,
}

impl LayerSpecs {
    /// Declares the tensors of a layer that a rank loads. `layout` is the layout of the experts.
    pub fn new(config: &Config, layer: usize, layout: ExpertLayout, rank: GroupRank) -> Self {
        let (names, hyper) = (Names { layer }, config.hyper);
        let streams = |name: &str| {
            let name = names.tensor(&format!("hc_{name}"));
            ProjectionSpecs::new(&name, hyper, hyper.mix_elements(), 3)
        };
        let is_last = layer + 1 == config.layers.len();
        Self {
            attention_streams: streams("attn"),
            attention_norm: names.norm("attn_norm", hyper.width),
            attention: AttentionSpecs::new(config, names, rank),
            mlp_streams: streams("ffn"),
            mlp_norm: names.norm("ffn_norm", hyper.width),
            mlp: MlpSpecs::new(config, names, layout, rank),
            head: is_last.then(|| ProjectionSpecs::new("hc_head", hyper, hyper.streams, 1)),
        }
    }

    /// Returns all tensors, in the order of loading.
    pub fn all(&self) -> Vec<&TensorSpec> {
        let Self { attention_streams, attention_norm, attention, mlp_streams, mlp_norm, mlp, head } = self;
        let mut all = attention_streams.all();
        all.push(attention_norm);
        all.extend(attention.all());
        all.extend(mlp_streams.all());
        all.push(mlp_norm);
        all.extend(mlp.all());
        all.extend(head.iter().flat_map(ProjectionSpecs::all));
        all
    }
}

/// The names of one layer's tensors.
#[derive(Clone, Copy)]
struct Names {
    layer: usize,
}

impl Names {
    fn tensor(self, name: &str) -> String {
        format!("layers.{}.{name}", self.layer)
    }

    fn matrix(self, module: &str, outputs: usize, inputs: usize) -> TensorSpec {
        let name = self.tensor(&format!("{module}.weight"));
        TensorSpec::matrix(name, Role::Projection, outputs, inputs)
    }

    fn norm(self, module: &str, width: usize) -> TensorSpec {
        TensorSpec::vector(self.tensor(&format!("{module}.weight")), Role::Norm, width)
    }
}

impl ProjectionSpecs {
    /// Declares the tensors of a projection with `outputs` outputs in `parts` parts.
    fn new(name: &str, hyper: HyperShape, outputs: usize, parts: usize) -> Self {
        let name = |tensor: &str| format!("{name}_{tensor}");
        let inputs = hyper.stream_elements();
        Self {
            weight: TensorSpec::matrix(name("fn"), Role::Projection, outputs, inputs)
                .held_as(Precision::Type(WeightType::F32)),
            base: TensorSpec::vector(name("base"), Role::Bias, outputs),
            // Dummy weights have ones.
            scale: TensorSpec::vector(name("scale"), Role::Norm, parts),
        }
    }

    fn all(&self) -> Vec<&TensorSpec> {
        vec![&self.weight, &self.base, &self.scale]
    }
}

impl AttentionSpecs {
    fn new(config: &Config, names: Names, rank: GroupRank) -> Self {
        let TextConfig { hidden_size: hidden, heads, head_dim: dim, .. } = config.text;
        let Config { q_rank, groups, group_width, indexer, .. } = *config;
        let kind = config.layers[names.layer];
        let compressor = |module: &str, shape| CompressorSpecs::new(module, names, shape, hidden);
        // The checkpoint has the groups' matrices one below another. A spec takes one of them.
        let o_a = names.matrix("attn.wo_a", groups * group_width, heads / groups * dim);
        let of_group = |group| Cut::PartOfRows { units: 1, parts: groups, part: group };
        Self {
            q_a: names.matrix("attn.wq_a", q_rank, hidden),
            q_norm: names.norm("attn.q_norm", q_rank),
            q_b: names.matrix("attn.wq_b", heads * dim, q_rank).cut(Cut::Rows(heads)),
            kv: names.matrix("attn.wkv", dim, hidden),
            kv_norm: names.norm("attn.kv_norm", dim),
            sinks: TensorSpec::vector(names.tensor("attn.attn_sink"), Role::Bias, heads)
                .cut(Cut::Rows(heads)),
            compressor: config.compressor(kind).map(|shape| compressor("attn.compressor", shape)),
            indexer: (kind == LayerKind::Sparse).then(|| IndexerSpecs {
                compressor: compressor("attn.indexer.compressor", config.index_compressor()),
                q_b: names.matrix("attn.indexer.wq_b", indexer.heads * indexer.head_dim, q_rank),
                weights: names
                    .matrix("attn.indexer.weights_proj", indexer.heads, hidden)
                    .held_as(Precision::Stored),
            }),
            o_a: share(groups, rank).map(|group| o_a.clone().cut(of_group(group))).collect(),
            o_b: names.matrix("attn.wo_b", hidden, groups * group_width).cut(Cut::Columns(groups)),
        }
    }

    fn all(&self) -> Vec<&TensorSpec> {
        let Self { q_a, q_norm, q_b, kv, kv_norm, sinks, compressor, indexer, o_a, o_b } = self;
        let mut all = vec![q_a, q_norm, q_b, kv, kv_norm, sinks];
        all.extend(compressor.iter().flat_map(CompressorSpecs::all));
        if let Some(IndexerSpecs { compressor, q_b, weights }) = indexer {
            all.extend(compressor.all());
            all.extend([q_b, weights]);
        }
        all.extend(o_a.iter().chain([o_b]));
        all
    }
}

impl CompressorSpecs {
    fn new(module: &str, names: Names, shape: CompressorShape, hidden: usize) -> Self {
        let CompressorShape { ratio, width, parts } = shape;
        // Checkpoints quantise no compressor either.
        let projection = |name: &str| {
            let name = format!("{module}.{name}");
            names.matrix(&name, parts * width, hidden).held_as(Precision::Stored)
        };
        let offsets = names.tensor(&format!("{module}.ape"));
        Self {
            projections: [projection("wkv"), projection("wgate")],
            offsets: TensorSpec::matrix(offsets, Role::Bias, ratio, parts * width)
                .held_as(Precision::Type(WeightType::F32)),
            norm: names.norm(&format!("{module}.norm"), width),
        }
    }

    fn all(&self) -> Vec<&TensorSpec> {
        let [k, gate] = &self.projections;
        vec![k, gate, &self.offsets, &self.norm]
    }
}

impl MlpSpecs {
    fn new(config: &Config, names: Names, layout: ExpertLayout, rank: GroupRank) -> Self {
        let (hidden, width, shape) = (config.text.hidden_size, config.shared_width, &config.experts);
        let choice = |name: &str| names.tensor(&format!("ffn.gate.{name}"));
        let shared = |name: &str, outputs, inputs, cut| {
            names.matrix(&format!("ffn.shared_experts.{name}"), outputs, inputs).cut(cut)
        };
        let (vocabulary, top_k) = (config.text.vocab_size, shape.routing.top_k);
        let table_of = config.by_token[names.layer].then_some(shape.experts);
        Self {
            experts: ExpertSpecs::new(&mlp_name(names.layer), shape, layout, rank),
            choice: match table_of {
                Some(_) => TensorSpec::matrix(choice("tid2eid"), Role::Indices, vocabulary, top_k)
                    .held_as(Precision::Type(WeightType::F32)),
                None => TensorSpec::vector(choice("bias"), Role::Bias, shape.experts),
            },
            table_of,
            gate_up: [
                shared("w1", width, hidden, Cut::Rows(width)),
                shared("w3", width, hidden, Cut::Rows(width)),
            ],
            down: shared("w2", hidden, width, Cut::Columns(width)),
        }
    }

    fn all(&self) -> Vec<&TensorSpec> {
        let Self { experts, choice, table_of: _, gate_up, down } = self;
        experts.all().chain([choice]).chain(gate_up).chain([down]).collect()
    }
}

/// One layer's weights on a device. The shapes below are for a group of one rank.
pub(super) struct Layer<D: Device> {
    pub attention_streams: Projection<D>,
    pub attention_norm: D::Vector,
    pub attention: AttentionWeights<D>,
    pub mlp_streams: Projection<D>,
    pub mlp_norm: D::Vector,
    pub mlp: MlpWeights<D>,
}

/// A projection of the streams.
pub(super) struct Projection<D: Device> {
    weight: D::Vector,
    base: D::Vector,
    scale: D::Vector,
}

/// The weights of an attention sublayer.
pub(super) struct AttentionWeights<D: Device> {
    /// `[q_rank, hidden]`.
    pub q_a: D::Matrix,
    pub q_norm: D::Vector,
    /// `[heads * head_dim, q_rank]`.
    pub q_b: D::Matrix,
    /// `[head_dim, hidden]`.
    pub kv: D::Matrix,
    pub kv_norm: D::Vector,
    /// One logit per head.
    pub sinks: D::Vector,
    /// `None` in a sliding layer.
    pub compressor: Option<Compressor<D>>,
    /// `None` in a layer that attends to all entries.
    pub indexer: Option<IndexerWeights<D>>,
    /// Per group, `[group_width, heads / groups * head_dim]`.
    pub o_a: Vec<D::Matrix>,
    /// `[hidden, groups * group_width]`.
    pub o_b: D::Matrix,
}

/// The weights of a compressor.
pub(super) struct Compressor<D: Device> {
    /// k and gate fused: `[2 * parts * width, hidden]`.
    pub projection: D::Matrix,
    /// `[ratio, parts * width]`.
    pub offsets: D::Vector,
    pub norm: D::Vector,
}

/// The weights of an indexer.
pub(super) struct IndexerWeights<D: Device> {
    pub compressor: Compressor<D>,
    /// `[heads * head_dim, q_rank]`.
    pub q_b: D::Matrix,
    /// `[heads, hidden]`.
    pub weights: D::Matrix,
}

/// The weights of an MLP.
pub(super) struct MlpWeights<D: Device> {
    pub experts: ExpertWeights<D>,
    choice: Choice<D>,
    /// gate and up of the shared expert fused: `[2 * width, hidden]`.
    pub gate_up: D::Matrix,
    /// Down projection of the shared expert, `[hidden, width]`.
    pub down: D::Matrix,
}

enum Choice<D: Device> {
    /// Bias of the choice, `[experts]`.
    Bias(D::Vector),
    /// Experts by token id, `[vocabulary, top_k]`.
    Table(D::Vector),
}

impl<D: Device> Layer<D> {
    pub fn load(specs: &LayerSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        Ok(Self {
            attention_streams: Projection::load(&specs.attention_streams, loader)?,
            attention_norm: loader.vector(&[&specs.attention_norm])?,
            attention: AttentionWeights::load(&specs.attention, loader)?,
            mlp_streams: Projection::load(&specs.mlp_streams, loader)?,
            mlp_norm: loader.vector(&[&specs.mlp_norm])?,
            mlp: MlpWeights::load(&specs.mlp, loader)?,
        })
    }
}

impl<D: Device> Projection<D> {
    /// Loads the projection behind all layers, whose tensors are in the specs of the last layer.
    pub fn load_head(specs: &LayerSpecs, loader: &mut Loader<'_, D>) -> Result<Option<Self>, LoadError> {
        specs.head.as_ref().map(|head| Self::load(head, loader)).transpose()
    }

    fn load(specs: &ProjectionSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        Ok(Self {
            weight: loader.vector(&[&specs.weight])?,
            base: loader.vector(&[&specs.base])?,
            scale: loader.vector(&[&specs.scale])?,
        })
    }

    pub fn operands(&self) -> StreamProjection<'_, D::Vector> {
        StreamProjection { weight: &self.weight, scale: &self.scale, base: &self.base }
    }
}

impl<D: Device> AttentionWeights<D> {
    fn load(specs: &AttentionSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        Ok(Self {
            q_a: loader.matrix(&[&specs.q_a])?,
            q_norm: loader.vector(&[&specs.q_norm])?,
            q_b: loader.matrix(&[&specs.q_b])?,
            kv: loader.matrix(&[&specs.kv])?,
            kv_norm: loader.vector(&[&specs.kv_norm])?,
            sinks: loader.vector(&[&specs.sinks])?,
            compressor: match &specs.compressor {
                Some(compressor) => Some(Compressor::load(compressor, loader)?),
                None => None,
            },
            indexer: match &specs.indexer {
                Some(IndexerSpecs { compressor, q_b, weights }) => Some(IndexerWeights {
                    compressor: Compressor::load(compressor, loader)?,
                    q_b: loader.matrix(&[q_b])?,
                    weights: loader.matrix(&[weights])?,
                }),
                None => None,
            },
            o_a: specs.o_a.iter().map(|o_a| loader.matrix(&[o_a])).collect::<Result<_, _>>()?,
            o_b: loader.matrix(&[&specs.o_b])?,
        })
    }
}

impl<D: Device> Compressor<D> {
    fn load(specs: &CompressorSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        let [k, gate] = &specs.projections;
        Ok(Self {
            projection: loader.matrix(&[k, gate])?,
            offsets: loader.vector(&[&specs.offsets])?,
            norm: loader.vector(&[&specs.norm])?,
        })
    }
}

impl<D: Device> MlpWeights<D> {
    fn load(specs: &MlpSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        let experts = ExpertWeights::load(&specs.experts, loader)?;
        let choice = match specs.table_of {
            Some(experts) => Choice::Table(loader.indices(&specs.choice, experts)?),
            None => Choice::Bias(loader.vector(&[&specs.choice])?),
        };
        Ok(Self {
            experts,
            choice,
            gate_up: loader.gate_up(specs.gate_up.each_ref())?,
            down: loader.matrix(&[&specs.down])?,
        })
    }

    /// Returns the rule that chooses a token's experts.
    pub fn choice(&self) -> ExpertChoice<'_, D::Vector> {
        match &self.choice {
            Choice::Bias(bias) => ExpertChoice::Largest { bias: Some(bias) },
            Choice::Table(table) => ExpertChoice::ByToken(table),
        }
    }
}
