//! The parts of a mixture of experts that families share: its tensors and their division among ranks, and the
//! computation of a layer.
//!
//! A router is a linear map in f32 that computes one logit per expert for each token. The MLP's output for a token is
//! the weighted sum of the outputs of a few experts (Shazeer et al., arXiv:1701.06538; routing as in Qwen3-MoE,
//! arXiv:2505.09388). The ranks of a group either divide the intermediate width of every expert, as they do in dense
//! layers, or divide whole experts among themselves (Lepikhin et al., arXiv:2006.16668). In both cases every rank
//! routes all tokens, and the ranks' outputs are summed.

use std::{fmt, ops::Range, path::Path};

use tutti_kernels::{
    Device, DeviceError, ExpertBuffers, ExpertChoice, Linear, MixExperts, Norm, Routing, WeightType,
    collective::GroupRank,
};

use tutti_runtime::gguf;

use crate::{
    DecoderDevice, LoadError, LoadFormat, LoadOptions,
    config::{
        keys::Keys,
        ranges::{self, product},
        text::{TextConfig, divides},
    },
    decoder::LayerStep,
    weights::{Cut, Loader, Precision, Role, SafetensorsDir, TensorSpec, share},
};

/// Error for `--ep` with a model without experts.
pub(crate) const NO_EXPERTS: &str = "num_experts: the model has none that --ep could divide";

/// The names by which the configs and the checkpoints of families call experts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExpertNames {
    /// Key of the number of experts.
    pub count: &'static str,
    /// Modules of an expert: gate, up and down.
    pub projections: [&'static str; 3],
}

/// The names in most families.
const NAMES: ExpertNames =
    ExpertNames { count: "num_experts", projections: ["gate_proj", "up_proj", "down_proj"] };

/// The sizes of experts in a config. The model may have no layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertSizes {
    /// Number of experts; 0 if the model has none.
    pub experts: usize,
    /// Number of experts per token.
    pub top_k: usize,
    /// Intermediate width per expert.
    pub intermediate_size: usize,
}

impl ExpertSizes {
    /// Reads the keys. `defaults` holds the values for keys that the config lacks.
    pub fn read(keys: &Keys<'_>, defaults: Self) -> Result<Self, LoadError> {
        Ok(Self {
            experts: match (keys.get(&ranges::NUM_EXPERTS)?, keys.get(&ranges::NUM_LOCAL_EXPERTS)?) {
                (Some(experts), _) | (None, Some(experts)) => experts,
                (None, None) => defaults.experts,
            },
            top_k: keys.get_or(&ranges::NUM_EXPERTS_PER_TOK, defaults.top_k)?,
            intermediate_size: keys.get_or(&ranges::MOE_INTERMEDIATE_SIZE, defaults.intermediate_size)?,
        })
    }

    /// Checks the sizes, and returns the shape of a model's experts. The error names the key at fault.
    pub fn check(self, text: &TextConfig, renormalise: bool) -> Result<ExpertShape, String> {
        self.shape(text, &NAMES, Routing { renormalise, ..Routing::softmax(self.top_k) })
    }

    /// Checks the sizes, and returns the shape of experts with these names and this routing. The error names the key at
    /// fault.
    pub fn shape(
        self,
        text: &TextConfig,
        names: &'static ExpertNames,
        routing: Routing,
    ) -> Result<ExpertShape, String> {
        let (Self { experts, top_k, intermediate_size }, count) = (self, names.count);
        for (key, number) in [(count, experts), ("moe_intermediate_size", intermediate_size)] {
            if number == 0 {
                return Err(format!("{key}: must be at least 1, not 0"));
            }
        }
        if top_k == 0 || top_k > experts {
            return Err(format!("num_experts_per_tok: {top_k} of {count}, {experts}"));
        }
        let (width, hidden_size) = (("moe_intermediate_size", intermediate_size), text.hidden_size);
        let experts_of_all = [("num_hidden_layers", text.layers), (count, experts)];
        product(experts_of_all, ranges::MAX_EXPERTS_OF_ALL_LAYERS)?;
        product([(count, experts), width, ("hidden_size", hidden_size)], ranges::MAX_TENSOR)?;
        let (limit, division) = (None, Division::Width);
        Ok(ExpertShape { names, hidden_size, intermediate_size, experts, routing, limit, division })
    }
}

/// The experts of a model. All layers with experts have the same shape.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertShape {
    pub names: &'static ExpertNames,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Intermediate width per expert.
    pub intermediate_size: usize,
    /// Number of experts.
    pub experts: usize,
    /// The number of a token's experts, and their weights.
    pub routing: Routing,
    /// Bound of gate and up before the activation; `None` for no bound.
    pub limit: Option<f32>,
    /// Division among ranks.
    pub division: Division,
}

impl fmt::Display for ExpertShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { experts, routing, intermediate_size, .. } = self;
        write!(f, "{} of {experts} experts of {intermediate_size} per token", routing.top_k)
    }
}

/// The division of experts among the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Division {
    /// Each rank holds a share of the intermediate width of every expert.
    Width,
    /// Each rank holds whole experts.
    Experts,
}

/// The layout of experts in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpertLayout {
    /// Three tensors per expert.
    Each,
    /// Two tensors per layer: one of gate and up of all experts, and one of the down projections of all experts.
    Stacked,
    /// As [`Self::Stacked`], but each matrix is `[inputs, outputs]`.
    StackedTransposed,
}

impl ExpertLayout {
    /// Returns the layout of the experts in the checkpoint in `dir`. `module` is the name of an MLP with experts in
    /// this checkpoint. Dummy weights have three tensors per expert.
    pub fn of(dir: &Path, options: &LoadOptions, module: &str) -> Result<Self, LoadError> {
        // A GGUF file stacks experts, and gives each as a tensor of its own.
        if options.load_format != LoadFormat::Auto || gguf::is_file(dir) {
            return Ok(Self::Each);
        }
        let files = SafetensorsDir::open(dir)?;
        let shape = |tensor: &str| files.shape(&format!("{module}.experts.{tensor}"));
        Ok(match (shape("gate_up_proj"), shape("down_proj")) {
            (None, _) => Self::Each,
            // In these families, an expert has one intermediate width. Gate and up have twice that number of outputs,
            // and as many inputs as down has outputs.
            (Some(&[_, inputs, fused]), Some(&[_, width, outputs]))
                if inputs == outputs && width.checked_mul(2) == Some(fused) =>
            {
                Self::StackedTransposed
            }
            _ => Self::Stacked,
        })
    }
}

impl ExpertShape {
    /// Refuses a number of ranks among which the experts cannot be divided equally. The error names the key.
    pub fn check(&self, group_rank: GroupRank) -> Result<(), String> {
        match self.division {
            Division::Width => divides("moe_intermediate_size", self.intermediate_size, group_rank),
            Division::Experts => divides(self.names.count, self.experts, group_rank)
                .map_err(|problem| problem + ", and --ep divides whole experts"),
        }
    }

    /// Returns the indices of the experts whose weights a rank holds.
    fn held(&self, rank: GroupRank) -> Range<usize> {
        match self.division {
            Division::Width => 0..self.experts,
            Division::Experts => share(self.experts, rank),
        }
    }

    /// Returns the intermediate width per expert on a rank.
    fn width(&self, rank: GroupRank) -> usize {
        match self.division {
            Division::Width => share(self.intermediate_size, rank).len(),
            Division::Experts => self.intermediate_size,
        }
    }
}

/// The tensors of one layer's experts.
pub(crate) struct ExpertSpecs {
    router: TensorSpec,
    experts: Tensors,
}

enum Tensors {
    /// Gate, up and down of each expert that the rank holds.
    Each(Vec<[TensorSpec; 3]>),
    /// Two stacks: gate and up of all experts, and down of all experts.
    Stacked(Box<[TensorSpec; 2]>),
}

impl ExpertSpecs {
    /// Declares the tensors of the MLP that is named `module` in the checkpoint.
    pub fn new(module: &str, shape: &ExpertShape, layout: ExpertLayout, rank: GroupRank) -> Self {
        let ExpertShape { hidden_size: hidden, intermediate_size: width, experts, division, .. } = *shape;
        let (rows, columns) = match (division, layout) {
            (Division::Width, _) => (Cut::Rows(width), Cut::Columns(width)),
            (Division::Experts, ExpertLayout::Stacked | ExpertLayout::StackedTransposed) => {
                (Cut::Matrices, Cut::Matrices)
            }
            // Only the rank's own experts are declared, each with all of its rows and columns.
            (Division::Experts, ExpertLayout::Each) => (Cut::Replicated, Cut::Replicated),
        };
        let name = |tensor: &str| format!("{module}.{tensor}");
        let linear = |name: String, rows, columns, cut| {
            TensorSpec::matrix(name, Role::Projection, rows, columns).cut(cut)
        };
        let each = |expert: usize| {
            let name = |projection: &str| name(&format!("experts.{expert}.{projection}.weight"));
            let [gate, up, down] = shape.names.projections;
            [
                linear(name(gate), width, hidden, rows),
                linear(name(up), width, hidden, rows),
                linear(name(down), hidden, width, columns),
            ]
        };
        let stack = |projection: &str, rows, columns| {
            TensorSpec::stack(
                name(&format!("experts.{projection}")),
                Role::Projection,
                [experts, rows, columns],
            )
        };
        Self {
            router: linear(name("gate.weight"), experts, hidden, Cut::Replicated)
                .held_as(Precision::Type(WeightType::F32)),
            experts: match layout {
                ExpertLayout::Each => Tensors::Each(shape.held(rank).map(each).collect()),
                ExpertLayout::Stacked | ExpertLayout::StackedTransposed => {
                    let stacks = [
                        stack("gate_up_proj", 2 * width, hidden).in_parts(2).cut(rows),
                        stack("down_proj", hidden, width).cut(columns),
                    ];
                    Tensors::Stacked(Box::new(match layout {
                        ExpertLayout::StackedTransposed => stacks.map(TensorSpec::transposed),
                        _ => stacks,
                    }))
                }
            },
        }
    }

    /// Returns all tensors, in the order of loading.
    pub fn all(&self) -> impl Iterator<Item = &TensorSpec> {
        let experts = match &self.experts {
            Tensors::Each(each) => each.as_flattened(),
            Tensors::Stacked(stacks) => &stacks[..],
        };
        std::iter::once(&self.router).chain(experts)
    }
}

/// The experts of one layer on a device.
pub(crate) struct ExpertWeights<D: Device> {
    /// `[experts, hidden]`.
    router: D::Matrix,
    /// Gate and up of each expert that this rank holds.
    gate_up: Vec<D::Matrix>,
    /// Down projection of each expert that this rank holds.
    down: Vec<D::Matrix>,
}

impl<D: Device> ExpertWeights<D> {
    pub fn load(specs: &ExpertSpecs, loader: &mut Loader<'_, D>) -> Result<Self, LoadError> {
        let router = loader.matrix(&[&specs.router])?;
        let (gate_up, down) = match &specs.experts {
            Tensors::Each(each) => {
                let (mut gate_ups, mut downs) =
                    (Vec::with_capacity(each.len()), Vec::with_capacity(each.len()));
                for [gate, up, down] in each {
                    gate_ups.push(loader.gate_up([gate, up])?);
                    downs.push(loader.matrix(&[down])?);
                }
                (gate_ups, downs)
            }
            Tensors::Stacked(stacks) => {
                let [gate_up, down] = &**stacks;
                (loader.gate_ups(gate_up)?, loader.matrices(down)?)
            }
        };
        Ok(Self { router, gate_up, down })
    }
}

/// Buffers of the layers with experts, for the largest step, which has `T` tokens.
pub(crate) struct ExpertMixer<D: Device> {
    routing: Routing,
    limit: Option<f32>,
    /// Index of the first expert that this rank holds.
    first: usize,
    /// Input of the experts, `[T, hidden]`.
    pub normed: D::Tensor,
    /// Logits of the router, `[T, experts]`.
    logits: D::Tensor,
    buffers: ExpertBuffers<D::Tensor>,
    /// This rank's part of the experts' weighted sum, `[T, hidden]`.
    pub mixed: D::Tensor,
}

impl<D: DecoderDevice> ExpertMixer<D> {
    pub fn allocate(shape: &ExpertShape, tokens: usize, device: &mut D) -> Result<Self, DeviceError> {
        let (rank, hidden) = (device.group_rank(), shape.hidden_size);
        let mut buffer = |width| device.tensor(tokens, width);
        Ok(Self {
            routing: shape.routing,
            limit: shape.limit,
            first: shape.held(rank).start,
            normed: buffer(hidden)?,
            logits: buffer(shape.experts)?,
            buffers: ExpertBuffers {
                inputs: buffer(hidden)?,
                activated: buffer(shape.width(rank))?,
                outputs: buffer(hidden)?,
            },
            mixed: buffer(hidden)?,
        })
    }

    /// Normalises the residual stream, runs the experts on it, and adds their output to the residual stream. `layer` is
    /// the layer's index among all layers.
    pub fn run(
        &mut self,
        step: &mut LayerStep<'_, D>,
        weights: &ExpertWeights<D>,
        norm: Norm<'_, D::Vector>,
        layer: usize,
    ) -> Result<(), DeviceError> {
        let valid_rows = step.valid_rows();
        step.device.rms_norm(step.hidden, norm, &mut self.normed)?;
        self.mix(step.device, valid_rows, (weights, ExpertChoice::Largest { bias: None }), layer)?;
        step.add_sum(&mut self.mixed)
    }

    /// Runs the experts on [`Self::normed`]. Only the first `valid_rows` rows choose experts. `layer` is the layer's
    /// index among all layers.
    pub fn mix(
        &mut self,
        device: &mut D,
        valid_rows: usize,
        (weights, choice): (&ExpertWeights<D>, ExpertChoice<'_, D::Vector>),
        layer: usize,
    ) -> Result<(), DeviceError> {
        let Self { routing, limit, first, normed, logits, buffers, mixed } = self;
        device.linear(Linear::plain(normed, &weights.router), logits)?;
        let ExpertWeights { gate_up, down, .. } = weights;
        let (x, routing, limit, first) = (&*normed, *routing, *limit, *first);
        let mix = MixExperts {
            x,
            valid_rows,
            logits,
            routing,
            choice,
            limit,
            first,
            gate_up,
            down,
            buffers,
            layer,
        };
        device.mix_experts(mix, mixed)
    }
}
