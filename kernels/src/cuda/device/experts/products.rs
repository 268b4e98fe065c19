//! The matrix products of experts: the choice of the kernel, and its launch.

use std::ops::Range;

use crate::cuda::arguments::MultiplyExperts;
use crate::cuda::device::codes::Tile;
use crate::cuda::kernels::{Grid, Kernels};
use crate::cuda::memory::DevicePointer;
use crate::cuda::sources::{Kernel, kernel};
use crate::cuda::tensor::{CodesLayout, Matrix};
use crate::{DeviceError, WeightType};

/// Threads per block.
const THREADS: u32 = 128;
/// Number of 16-bit elements that the kernels for tensor cores copy at once. The width of a row and the number of gates
/// must be multiples of this number.
const ALIGNMENT: usize = 8;

/// Consecutive experts whose matrices have the same type and shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// Indices among the experts that this rank holds.
    pub(super) experts: Range<usize>,
    /// Types of the inputs of the gated product and of the down projection.
    pub(super) dtypes: [WeightType; 2],
    /// Layouts of gate with up, and of down; `None` for weights of the type of their inputs.
    pub(super) codes: [Option<CodesLayout>; 2],
    /// Number of gates.
    pub(super) intermediate: usize,
}

/// Divides experts into kinds. Returns an error if the two matrices of an expert do not fit each other, or do not fit
/// inputs of `width` elements.
pub(super) fn kinds(gate_up: &[Matrix], down: &[Matrix], width: usize) -> Result<Vec<Kind>, DeviceError> {
    let mut kinds: Vec<Kind> = Vec::new();
    for (expert, (gate_up, down)) in gate_up.iter().zip(down).enumerate() {
        let (intermediate, dtype, outputs) = (gate_up.gates()?, gate_up.dtype, down.plain_outputs()?);
        if gate_up.inputs != width || down.inputs != intermediate || outputs != width {
            return Err(DeviceError::Misuse(format!(
                "expert {expert}: matrices of {intermediate} gates of {} and {outputs} outputs of {} for inputs of {width}",
                gate_up.inputs, down.inputs
            )));
        }
        // Only the kernels for codes give activations of any type.
        if down.dtype != dtype && gate_up.codes.is_none() {
            let stored = |matrix: &Matrix| match matrix.codes {
                Some(codes) => format!("{:?}", codes.element),
                None => format!("{:?}", matrix.dtype),
            };
            let (gate_up, down) = (stored(gate_up), stored(down));
            return Err(DeviceError::Unsupported(format!(
                "expert {expert}: gate and up in {gate_up}, down in {down}"
            )));
        }
        let kind = Kind {
            experts: expert..expert + 1,
            dtypes: [dtype, down.dtype],
            codes: [gate_up.codes, down.codes],
            intermediate,
        };
        match kinds.last_mut() {
            Some(last) if (Kind { experts: last.experts.clone(), ..kind.clone() }) == *last => {
                last.experts.end = expert + 1;
            }
            _ => kinds.push(kind),
        }
    }
    Ok(kinds)
}

/// The variants of the kernels for the matrix products of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Kernels without tensor cores.
    Plain,
    /// Tensor cores, for experts with few rows.
    Narrow,
    /// Tensor cores, for experts with many rows.
    Wide,
}

impl Form {
    /// Returns the form for experts with unquantised weights and rows of these widths, if `experts` experts have
    /// `pairs` pairs of row and expert in total. Narrow and wide tiles give the same bits.
    fn of(dtype: WeightType, widths: [usize; 2], pairs: usize, experts: usize) -> Self {
        let is_aligned = widths.iter().all(|width| width.is_multiple_of(ALIGNMENT));
        let (fits_narrow, _) = Self::Narrow.tile();
        match dtype {
            WeightType::F32 => Self::Plain,
            _ if !is_aligned => Self::Plain,
            _ if pairs <= fits_narrow * experts => Self::Narrow,
            _ => Self::Wide,
        }
    }

    /// Pairs of row and expert, and output columns, per tile: as in `sources/experts.cu` and
    /// `sources/experts_tiles.cu`.
    fn tile(self) -> (usize, usize) {
        match self {
            Self::Plain => (32, 64),
            Self::Narrow => (16, 64),
            Self::Wide => (64, 128),
        }
    }

    /// Returns the kernels of the gated product and of the down projection.
    fn kernels(self, dtype: WeightType) -> [Kernel<MultiplyExperts>; 2] {
        use WeightType::{Bf16, F16, F32};
        match (self, dtype) {
            (Self::Plain, F32) => [kernel::expert_gates_f32, kernel::expert_outputs_f32],
            (Self::Plain, Bf16) => [kernel::expert_gates_bf16, kernel::expert_outputs_bf16],
            (Self::Plain, F16) => [kernel::expert_gates_f16, kernel::expert_outputs_f16],
            (Self::Narrow, F16) => [kernel::expert_gates_narrow_f16, kernel::expert_outputs_narrow_f16],
            (Self::Narrow, _) => [kernel::expert_gates_narrow_bf16, kernel::expert_outputs_narrow_bf16],
            (Self::Wide, F16) => [kernel::expert_gates_wide_f16, kernel::expert_outputs_wide_f16],
            (Self::Wide, _) => [kernel::expert_gates_wide_bf16, kernel::expert_outputs_wide_bf16],
        }
    }
}

/// The pairs of row and expert that the kernel `group_rows` has listed for some experts.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    /// Address of each expert's number of pairs.
    pub(super) counts: DevicePointer<u32>,
    /// Address of the lists.
    pub(super) lists: DevicePointer<u32>,
    /// Number of experts of this launch.
    pub(super) experts: usize,
    /// Number of entries per list.
    pub(super) capacity: usize,
    /// Maximum number of pairs of these experts: the number of pairs of all experts.
    pub(super) most: usize,
}

/// The kernel of a product, with the size of its tiles.
#[derive(Clone, Copy)]
pub(super) enum ExpertKernel {
    Stored(Form, Kernel<MultiplyExperts>),
    Codes(Tile, CodesLayout),
}

impl ExpertKernel {
    /// Returns the kernels of the gated product and of the down projection of experts of a kind, if `experts` experts
    /// have `pairs` pairs of row and expert in total.
    pub(super) fn of(kind: &Kind, width: usize, pairs: usize, experts: usize) -> [Self; 2] {
        let tile = Tile::of_rows(pairs / experts.max(1));
        [0, 1].map(|index| match kind.codes[index] {
            Some(layout) => Self::Codes(tile, layout),
            None => {
                let dtype = kind.dtypes[index];
                let form = Form::of(dtype, [width, kind.intermediate], pairs, experts);
                Self::Stored(form, form.kernels(dtype)[index])
            }
        })
    }

    /// Pairs of row and expert, and output columns, per tile.
    fn tile(self) -> (usize, usize) {
        match self {
            Self::Stored(form, _) => form.tile(),
            Self::Codes(tile, _) => (tile.rows(), Tile::COLUMNS),
        }
    }
}

/// The matrix products of some experts, each over the pairs of that expert.
pub(super) struct ExpertProduct {
    pub(super) kernel: ExpertKernel,
    /// The type of the activations that the gated product gives; `None` for a down projection.
    pub(super) activated: Option<WeightType>,
    /// Address of the input. Row `p / pairs_per_row` belongs to pair `p`.
    pub(super) x: DevicePointer<u8>,
    pub(super) pairs_per_row: usize,
    /// Width of the input.
    pub(super) inputs: usize,
    /// Address of the table with the address of each expert's matrix.
    pub(super) matrices: DevicePointer<u64>,
    /// Address of the output, a row per pair.
    pub(super) out: DevicePointer<u8>,
    /// Width of the output.
    pub(super) outputs: usize,
}

impl ExpertProduct {
    pub(super) fn launch(&self, kernels: &Kernels, pairs: Pairs) -> Result<(), DeviceError> {
        let Self { x, matrices, out, .. } = *self;
        let Pairs { counts, lists, experts, capacity, most } = pairs;
        let (rows, columns) = self.kernel.tile();
        // Half of the columns of a gated tile belong to the up matrix.
        let columns = if self.activated.is_some() { columns / 2 } else { columns };
        // Each expert may have one tile that is only partly full.
        let tiles = most.min(most / rows + experts);
        let grid =
            Grid { blocks: (tiles, self.outputs.div_ceil(columns)), threads: THREADS, shared_bytes: 0 };
        let operands = MultiplyExperts {
            x,
            matrices,
            counts,
            lists,
            out,
            experts: experts as u32,
            capacity: capacity as u32,
            divisor: self.pairs_per_row as u32,
            inputs: self.inputs as u32,
            outputs: self.outputs as u32,
        };
        match self.kernel {
            ExpertKernel::Stored(_, kernel) => kernels.launch(kernel, grid, operands),
            ExpertKernel::Codes(tile, layout) => {
                let kernel = tile.experts_kernel(layout.element);
                kernels.launch(kernel, grid, operands.with_codes(&layout, self.activated))
            }
        }
    }
}
