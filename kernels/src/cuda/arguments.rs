//! The arguments of the kernels: a struct for each list of parameters, with one field per parameter in the kernel's
//! order.
//!
//! The structs describe the arguments that Tutti passes. When a kernel is loaded, they are compared with the parameters
//! of the compiled kernel: see [`parameters`](super::parameters).

use super::memory::DevicePointer;
use super::records::{Item, NominationTask, Row, RowResult, ScoreTask, SegmentTile, Task, Top};
use super::tensor::CodesLayout;
use crate::WeightType;

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Argument {
    /// Name of the field.
    pub(super) name: &'static str,
    /// Offset of the field in the struct, in bytes.
    pub(super) offset: usize,
    /// Width in bytes.
    pub(super) bytes: usize,
}

/// Largest number of arguments of a kernel.
pub(super) const MOST_ARGUMENTS: usize = 18;

/// The arguments of a kernel.
///
/// # Safety
///
/// `LIST` holds the offset and the width of each field, in the order of the fields.
pub(super) unsafe trait Arguments: Copy {
    const LIST: &'static [Argument];
}

/// Types that an argument can have. The sources call them `u32` or `int`, `u64`, `float`, and pointers.
trait Scalar: Copy {}

impl Scalar for u32 {}
impl Scalar for u64 {}
impl Scalar for f32 {}
impl<T> Scalar for DevicePointer<T> {}

/// Returns the width of an argument in bytes. It accepts only [`Scalar`] types, because a kernel takes no other ones.
const fn width_of<T: Scalar>() -> usize {
    size_of::<T>()
}

/// Declares structs of arguments.
macro_rules! arguments {
    ($($(#[$of_struct:meta])* struct $name:ident { $($field:ident: $kind:ty,)+ })+) => {$(
        $(#[$of_struct])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(super) struct $name {
            $(pub(super) $field: $kind,)+
        }

        // SAFETY: the macro makes the list from the fields.
        unsafe impl Arguments for $name {
            const LIST: &'static [Argument] = &[$(Argument {
                name: stringify!($field),
                offset: std::mem::offset_of!($name, $field),
                bytes: width_of::<$kind>(),
            },)+];
        }

        const _: () = assert!($name::LIST.len() <= MOST_ARGUMENTS);
    )+};
}

type Floats = DevicePointer<f32>;
type Words = DevicePointer<u32>;
/// Elements of a stored type: f32, f16 or bf16, as the kernel's name says.
type Stored = DevicePointer<u8>;
/// Bytes of a matrix of codes: the codes, the scales in f32 or f16, or the offsets.
type Codes = DevicePointer<u8>;
type Rows = DevicePointer<Row>;

arguments! {
    struct RmsNorm {
        x: Floats,
        weight: Floats,
        eps: f32,
        width: u32,
        out: Stored,
    }

    struct Cast {
        x: Floats,
        count: u64,
        out: Stored,
    }

    struct Add {
        x: Floats,
        count: u64,
        out: Floats,
    }

    struct AddBias {
        bias: Floats,
        width: u32,
        count: u64,
        out: Floats,
    }

    struct Gated {
        gate_up: Floats,
        width: u32,
        out: Floats,
        narrow: Stored,
    }

    struct SigmoidGate {
        gate: Floats,
        gates: u32,
        width: u32,
        count: u64,
        x: Floats,
    }

    struct KeepRows {
        x: Floats,
        rows: Words,
        count: u32,
        width: u32,
    }

    struct Embed {
        table: Stored,
        ids: Words,
        last_tokens: Words,
        first: u32,
        held: u32,
        width: u32,
        out: Floats,
    }

    struct EmbedCodes {
        codes: Codes,
        scales: Codes,
        offsets: Codes,
        stride: u32,
        groups: u32,
        shift: u32,
        kinds: u32,
        ids: Words,
        last_tokens: Words,
        first: u32,
        held: u32,
        width: u32,
        out: Floats,
    }

    /// `out` are the sums of splits if there are several.
    struct MultiplyCodes {
        x: Stored,
        codes: Codes,
        scales: Codes,
        offsets: Codes,
        out: Floats,
        rows: u32,
        inputs: u32,
        outputs: u32,
        stride: u32,
        groups: u32,
        shift: u32,
        kinds: u32,
        splits: u32,
        accumulate: u32,
    }

    struct SumSplits {
        parts: Floats,
        splits: u32,
        count: u64,
        accumulate: u32,
        out: Floats,
    }

    /// `axes` is null if all frequencies use the first axis.
    struct RopeAngles {
        positions: Floats,
        tokens: u32,
        inverse: Floats,
        axes: Words,
        half: u32,
        scale: f32,
        out: Floats,
    }

    /// `q_norm` and `k_norm` are null in a model without head norms.
    struct RotateAndStore {
        qkv: Floats,
        angles: Floats,
        q_norm: Floats,
        k_norm: Floats,
        kv_at: Words,
        kv: Stored,
        eps: f32,
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        rotated: u32,
        page_tokens: u32,
        key_scale: f32,
        value_scale: f32,
    }

    struct Attention {
        qkv: Floats,
        rows: Rows,
        row_of: Words,
        kv_at: Words,
        pages: Words,
        out: Floats,
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        page_tokens: u32,
        window: u32,
        scale: f32,
        value_scale: f32,
        kv: Stored,
    }

    struct AttentionTiles {
        qkv: Floats,
        rows: Rows,
        items: DevicePointer<Item>,
        kv_at: Words,
        pages: Words,
        out: Floats,
        part_sums: Floats,
        part_values: Floats,
        parts: u32,
        heads: u32,
        kv_heads: u32,
        page_tokens: u32,
        window: u32,
        scale: f32,
        value_scale: f32,
        kv: Stored,
    }

    struct MergeSplits {
        qkv: Floats,
        rows: Rows,
        items: DevicePointer<Item>,
        kv_at: Words,
        pages: Words,
        out: Floats,
        part_sums: Floats,
        part_values: Floats,
        parts: u32,
        heads: u32,
        kv_heads: u32,
        page_tokens: u32,
        window: u32,
        scale: f32,
        value_scale: f32,
    }

    struct RouteRows {
        logits: Floats,
        rows: u32,
        experts: u32,
        top_k: u32,
        renormalise: u32,
        chosen: Words,
        weights: Floats,
    }

    struct GroupRows {
        chosen: Words,
        pairs: u32,
        first: u32,
        held: u32,
        capacity: u32,
        counts: Words,
        lists: Words,
        totals: DevicePointer<u64>,
    }

    struct SumExperts {
        outputs: Floats,
        chosen: Words,
        weights: Floats,
        top_k: u32,
        first: u32,
        held: u32,
        width: u32,
        count: u64,
        out: Floats,
    }

    struct MultiplyExperts {
        x: Stored,
        matrices: DevicePointer<u64>,
        counts: Words,
        lists: Words,
        out: Stored,
        experts: u32,
        capacity: u32,
        divisor: u32,
        inputs: u32,
        outputs: u32,
    }

    struct MultiplyExpertCodes {
        x: Stored,
        matrices: DevicePointer<u64>,
        counts: Words,
        lists: Words,
        out: Stored,
        experts: u32,
        capacity: u32,
        divisor: u32,
        inputs: u32,
        outputs: u32,
        gated: u32,
        scales_at: u64,
        offsets_at: u64,
        stride: u32,
        groups: u32,
        shift: u32,
        kinds: u32,
    }

    struct DecayedSum {
        x: Floats,
        decay: Floats,
        rows: Rows,
        row_count: u32,
        tokens: u32,
        width: u32,
        state: DevicePointer<u8>,
        stride: u64,
        out: Floats,
    }

    struct DeltaInputs {
        projected: Floats,
        rows: Rows,
        row_of: Words,
        row_count: u32,
        tokens: u32,
        weights: Floats,
        rate: Floats,
        bias: Floats,
        key_states: DevicePointer<u8>,
        key_stride: u64,
        value_states: DevicePointer<u8>,
        value_stride: u64,
        key_heads: u32,
        value_heads: u32,
        key_dim: u32,
        value_dim: u32,
        taps: u32,
        out: Floats,
    }

    struct DeltaRule {
        inputs: Floats,
        rows: Rows,
        row_count: u32,
        tokens: u32,
        states: DevicePointer<u8>,
        stride: u64,
        key_heads: u32,
        value_heads: u32,
        key_dim: u32,
        value_dim: u32,
        out: Floats,
    }

    struct GatedNorm {
        gate: Floats,
        gate_width: u32,
        weight: Floats,
        eps: f32,
        rows: u32,
        heads: u32,
        width: u32,
        x: Floats,
    }

    struct LayerNorm {
        x: Floats,
        weight: Floats,
        bias: Floats,
        eps: f32,
        width: u32,
        out: Floats,
    }

    struct Gelu {
        count: u64,
        x: Floats,
    }

    struct RotateHeads {
        angles: Floats,
        heads: u32,
        head_dim: u32,
        qkv: Floats,
    }

    struct GatherConvolution {
        x: Floats,
        height: u32,
        width: u32,
        channels: u32,
        out: Floats,
    }

    struct SegmentAttention {
        qkv: Floats,
        tiles: DevicePointer<SegmentTile>,
        heads: u32,
        head_dim: u32,
        scale: f32,
        out: Floats,
    }

    /// `slots` is null if no row has a slot.
    struct Argmax {
        logits: Floats,
        width: u32,
        slots: Words,
        last_tokens: Words,
        results: DevicePointer<RowResult>,
    }

    struct PartialArgmax {
        logits: Floats,
        width: u32,
        first: u32,
        out: Floats,
    }

    /// `slots` is null if no row has a slot.
    struct BestCandidates {
        candidates: Floats,
        count: u32,
        rows: u32,
        slots: Words,
        last_tokens: Words,
        results: DevicePointer<RowResult>,
    }

    struct Sample {
        logits: Floats,
        width: u32,
        tasks: DevicePointer<Task>,
        words: Words,
        adjusted: Floats,
        weights: Floats,
        counts: Words,
        last_tokens: Words,
        results: DevicePointer<RowResult>,
        tops: DevicePointer<Top>,
    }

    struct SampleCandidates {
        candidates: Floats,
        width: u32,
        peaks: Floats,
        tasks: DevicePointer<Task>,
        logits: Floats,
        weights: Floats,
        ids: Words,
        last_tokens: Words,
        results: DevicePointer<RowResult>,
    }

    struct ScoreTokens {
        logits: Floats,
        width: u32,
        tasks: DevicePointer<ScoreTask>,
        results: DevicePointer<RowResult>,
        tops: DevicePointer<Top>,
    }

    struct AdjustShard {
        logits: Floats,
        width: u32,
        first: u32,
        tasks: DevicePointer<NominationTask>,
        words: Words,
        peaks: Floats,
    }

    struct Nominate {
        logits: Floats,
        width: u32,
        first: u32,
        tasks: DevicePointer<NominationTask>,
        peaks: Floats,
        out_count: u32,
        out: Floats,
    }

    struct MergePeaks {
        of_slices: Floats,
        slices: u32,
        tasks: DevicePointer<NominationTask>,
        rows: u32,
        peaks: Floats,
    }

    struct MergeNominated {
        of_slices: Floats,
        slices: u32,
        tasks: DevicePointer<NominationTask>,
        peaks: Floats,
        out_count: u32,
        out: Floats,
    }

    struct PackRows {
        x: Floats,
        rows: Words,
        count: u64,
        width: u32,
        out: Floats,
    }

    /// `rows` is null if each row keeps its index.
    struct LaySideBySide {
        parts: Floats,
        rows: Words,
        ranks: u32,
        row_count: u32,
        width: u32,
        count: u64,
        out: Floats,
    }

    struct Keys {
        x: Floats,
        count: u64,
    }
}

impl MultiplyExperts {
    /// Converts these arguments to those of the kernels for matrices of codes. `activated` is the type of the outputs
    /// of a gated product.
    pub(super) fn with_codes(
        self,
        layout: &CodesLayout,
        activated: Option<WeightType>,
    ) -> MultiplyExpertCodes {
        let Self { x, matrices, counts, lists, out, experts, capacity, divisor, inputs, outputs } = self;
        MultiplyExpertCodes {
            x,
            matrices,
            counts,
            lists,
            out,
            experts,
            capacity,
            divisor,
            inputs,
            outputs,
            gated: activated.map_or(0, |dtype| match dtype {
                WeightType::Bf16 => 1,
                WeightType::F16 => 2,
                WeightType::F32 => 3,
            }),
            scales_at: layout.scales_at as u64,
            offsets_at: layout.offsets_at as u64,
            stride: layout.stride as u32,
            groups: layout.groups as u32,
            shift: layout.shift,
            kinds: layout.kinds(),
        }
    }
}

impl MergeSplits {
    /// Converts these arguments to the arguments of the kernels that compute the partial results. Those kernels also
    /// take the layer's pages.
    pub(super) fn with_pages(self, kv: Stored) -> AttentionTiles {
        let Self { qkv, rows, items, kv_at, pages, out, part_sums, part_values, .. } = self;
        let Self { parts, heads, kv_heads, page_tokens, window, scale, value_scale, .. } = self;
        AttentionTiles {
            qkv,
            rows,
            items,
            kv_at,
            pages,
            out,
            part_sums,
            part_values,
            parts,
            heads,
            kv_heads,
            page_tokens,
            window,
            scale,
            value_scale,
            kv,
        }
    }
}
