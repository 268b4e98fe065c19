//! Mixtures of experts.
//!
//! A *pair* is a row and one of its experts. The GPU routes the rows, makes a list of pairs per expert, and computes
//! each expert's products over its list, so that the host never waits for the routing. Each pair has activations and
//! outputs of its own, and a row's outputs are added in the order of experts. Large steps are cut into chunks of rows.
//! This bounds the memory of the pairs and changes no bit of the result.

mod products;

use products::{ExpertKernel, ExpertProduct, Kind, Pairs, kinds};

use super::CudaDevice;
use crate::cuda::arguments::{Cast, GroupRows, RouteRows, SumExperts};
use crate::cuda::kernels::Grid;
use crate::cuda::memory::{DevicePointer, grown};
use crate::cuda::sources::kernel;
use crate::cuda::tensor::{Matrix, Tensor, Vector};
use crate::device::MixSizes;
use crate::{DeviceError, ExpertChoice, Experts, MixExperts, Routing, Score, WeightType};

/// Threads per block of the kernels that route rows, list pairs and sum outputs.
const THREADS: u32 = 256;
/// Rows per thread block of `route_rows`: one per warp.
const ROUTED_ROWS: usize = 8;
/// Maximum size in bytes of the outputs of a chunk's pairs. Each chunk reads the weights of its experts again, so a
/// chunk should have many rows per expert. For example, with 8 of 128 experts per row and outputs of 2,048 f32, a chunk
/// has 128 rows per expert.
pub(super) const OUTPUT_BYTES: usize = 128 << 20;
/// Bytes per index or weight of a pair.
const WORD: usize = 4;

/// The experts of a layer, and the addresses that all chunks of its rows use.
struct Layer {
    routing: Routing,
    /// Number of experts of the layer, on all ranks.
    experts: usize,
    /// Index of the first expert that this rank holds, and the number of those experts.
    first: usize,
    held: usize,
    width: usize,
    kinds: Vec<Kind>,
    /// Addresses of tables: the matrices' addresses (all of gate and up, then all of down), and the number of tokens of
    /// each expert.
    table: DevicePointer<u64>,
    totals: DevicePointer<u64>,
    memory: Memory,
}

/// Scratch memory for a chunk of rows.
struct Memory {
    rows: usize,
    /// Expert of each pair, and its weight in the row's sum.
    chosen: DevicePointer<u32>,
    weights: DevicePointer<f32>,
    /// The number of pairs of each expert that this rank holds, and a list of pairs per expert, with room for all rows.
    counts: DevicePointer<u32>,
    lists: DevicePointer<u32>,
    /// Activations of the pairs, in the type of the inputs of the down projection.
    activated: DevicePointer<u8>,
    outputs: DevicePointer<f32>,
}

impl Experts for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn mix_experts(
        &mut self,
        mix: MixExperts<'_, Tensor, Matrix, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        // `buffers` is not used. Its buffers have room for one expert at a time, but here all experts compute at once.
        let MixExperts {
            x,
            valid_rows,
            logits,
            routing,
            choice,
            limit,
            first,
            gate_up,
            down,
            buffers: _,
            layer,
        } = mix;
        check_variant(routing, &choice, limit)?;
        let (rows, width, experts, top_k) = (x.live, x.width, logits.width, routing.top_k);
        let (logit_rows, held) = (logits.live, [gate_up.len(), down.len()]);
        MixSizes { rows, logit_rows, valid_rows, experts, top_k, first, held }.check()?;
        let ([held, _], kinds) = (held, kinds(gate_up, down, width)?);
        out.written(rows, width)?;
        out.clear_from(valid_rows)?;

        let matrices = gate_up.iter().chain(down).map(|matrix| matrix.at().address());
        let table = self.expert_tables.of_layer(layer, matrices, &self.gpu, &mut self.inputs)?;
        let totals = self.expert_counts.of_layer(layer, experts, &self.gpu)?;
        let memory = self.memory_of_experts(x, top_k, held, &kinds)?;
        let layer = Layer { routing, experts, first, held, width, kinds, table, totals, memory };
        for start in (0..valid_rows).step_by(layer.memory.rows) {
            let rows = layer.memory.rows.min(valid_rows - start);
            let at = |tensor: &Tensor| tensor.at().add(start * tensor.width);
            self.route_rows(&layer, rows, at(logits))?;
            for kind in &layer.kinds {
                self.expert_products(&layer, kind, rows, at(x))?;
            }
            self.sum_experts(&layer, rows, at(out))?;
        }
        Ok(())
    }

    fn expert_tokens(&mut self, layer: usize, out: &mut Vec<u64>) -> Result<(), DeviceError> {
        out.clear();
        out.extend_from_slice(self.expert_counts.collected(layer));
        Ok(())
    }
}

/// Refuses the variants of routing and of experts that have no kernel here.
fn check_variant(
    routing: Routing,
    choice: &ExpertChoice<'_, Vector>,
    limit: Option<f32>,
) -> Result<(), DeviceError> {
    let refuse = |what: &str| Err(DeviceError::Unsupported(format!("mixtures of experts with {what}")));
    match (routing, choice, limit) {
        (Routing { score: Score::SqrtSoftplus, .. }, ..) => refuse("scores other than the softmax"),
        (Routing { scale, .. }, ..) if scale != 1.0 => refuse("scaled weights"),
        (_, ExpertChoice::Largest { bias: Some(_) }, _) => refuse("a bias of the choice"),
        (_, ExpertChoice::ByToken(_), _) => refuse("experts by token"),
        (_, _, Some(_)) => refuse("bounded activations"),
        (_, ExpertChoice::Largest { bias: None }, None) => Ok(()),
    }
}

impl CudaDevice {
    /// Makes room for chunks of rows of `x`. The sizes follow from the tensor's capacity, so they do not change after
    /// the first step.
    fn memory_of_experts(
        &mut self,
        x: &Tensor,
        top_k: usize,
        held: usize,
        kinds: &[Kind],
    ) -> Result<Memory, DeviceError> {
        let outputs_of_row = (top_k * x.width * size_of::<f32>()).max(1);
        let rows = (self.expert_output_bytes / outputs_of_row).min(x.capacity).max(1);
        let pairs = rows * top_k;
        let activated =
            kinds.iter().map(|kind| kind.intermediate * kind.dtypes[1].bytes()).max().unwrap_or(0);
        let (gpu, scratch) = (&self.gpu, &mut self.scratch);
        let routes = (2 * pairs + held + held * rows) * WORD;
        let chosen = grown(&mut scratch.routes, gpu, routes, "routes of experts")?.at::<u32>();
        let weights = chosen.add(pairs);
        let counts = weights.add(pairs);
        let lists = counts.add(held);
        let weights = weights.cast();
        let activated = grown(&mut scratch.activated, gpu, pairs * activated, "activations of experts")?.at();
        let outputs = rows * outputs_of_row;
        let outputs = grown(&mut scratch.expert_outputs, gpu, outputs, "outputs of experts")?.at();
        Ok(Memory { rows, chosen, weights, counts, lists, activated, outputs })
    }

    /// Enqueues the routing of `rows` rows by their logits, and the lists and counts of their pairs.
    fn route_rows(&self, layer: &Layer, rows: usize, logits: DevicePointer<f32>) -> Result<(), DeviceError> {
        let Routing { top_k, renormalise, .. } = layer.routing;
        let Memory { rows: capacity, chosen, weights, counts, lists, .. } = layer.memory;
        let operands = RouteRows {
            logits,
            rows: rows as u32,
            experts: layer.experts as u32,
            top_k: top_k as u32,
            renormalise: u32::from(renormalise),
            chosen,
            weights,
        };
        self.kernels.launch(kernel::route_rows, Grid::of(rows.div_ceil(ROUTED_ROWS), THREADS), operands)?;
        let operands = GroupRows {
            chosen,
            pairs: (rows * top_k) as u32,
            first: layer.first as u32,
            held: layer.held as u32,
            capacity: capacity as u32,
            counts,
            lists,
            totals: layer.totals,
        };
        self.kernels.launch(kernel::group_rows, Grid::of(layer.experts, THREADS), operands)
    }

    /// Enqueues the gated product and the down projection of the experts of one kind. `x` is the address of the chunk's
    /// rows.
    fn expert_products(
        &mut self,
        layer: &Layer,
        kind: &Kind,
        rows: usize,
        x: DevicePointer<f32>,
    ) -> Result<(), DeviceError> {
        let Layer { width, table, memory, .. } = layer;
        let (top_k, intermediate) = (layer.routing.top_k, kind.intermediate);
        let pairs = Pairs {
            counts: memory.counts.add(kind.experts.start),
            lists: memory.lists.add(kind.experts.start * memory.rows),
            experts: kind.experts.len(),
            capacity: memory.rows,
            most: rows * top_k,
        };
        let [gates, outputs] = ExpertKernel::of(kind, *width, pairs.most, layer.experts);
        let matrices = |index: usize| table.add(index + kind.experts.start);
        let gates = ExpertProduct {
            kernel: gates,
            activated: Some(kind.dtypes[1]),
            x: self.input_of_experts(layer, kind.dtypes[0], rows, x)?,
            pairs_per_row: top_k,
            inputs: *width,
            matrices: matrices(0),
            out: memory.activated,
            outputs: intermediate,
        };
        gates.launch(&self.kernels, pairs)?;
        let outputs = ExpertProduct {
            kernel: outputs,
            activated: None,
            x: memory.activated,
            pairs_per_row: 1,
            inputs: intermediate,
            matrices: matrices(layer.held),
            out: memory.outputs.cast(),
            outputs: *width,
        };
        outputs.launch(&self.kernels, pairs)
    }

    /// Returns the address of the chunk's rows in the type of the weights. Enqueues the conversion if the types differ.
    fn input_of_experts(
        &mut self,
        layer: &Layer,
        dtype: WeightType,
        rows: usize,
        x: DevicePointer<f32>,
    ) -> Result<DevicePointer<u8>, DeviceError> {
        let kernel = match dtype {
            WeightType::F32 => return Ok(x.cast()),
            WeightType::Bf16 => kernel::cast_bf16,
            WeightType::F16 => kernel::cast_f16,
        };
        let bytes = layer.memory.rows * layer.width * dtype.bytes();
        let input = grown(&mut self.scratch.input, &self.gpu, bytes, "the input of a product")?.at();
        let elements = rows * layer.width;
        let operands = Cast { x, count: elements as u64, out: input };
        self.kernels.launch(kernel, Grid::over(elements, THREADS), operands)?;
        Ok(input)
    }

    /// Enqueues the weighted sums of the chunk's rows. `out` is the address of the first row.
    fn sum_experts(&self, layer: &Layer, rows: usize, out: DevicePointer<f32>) -> Result<(), DeviceError> {
        let Memory { chosen, weights, outputs, .. } = layer.memory;
        let elements = rows * layer.width;
        let operands = SumExperts {
            outputs,
            chosen,
            weights,
            top_k: layer.routing.top_k as u32,
            first: layer.first as u32,
            held: layer.held as u32,
            width: layer.width as u32,
            count: elements as u64,
            out,
        };
        self.kernels.launch(kernel::sum_experts, Grid::over(elements, THREADS), operands)
    }
}
