//! Declarations of the kernels: the source of each kernel, and its arguments.

use std::marker::PhantomData;

use super::arguments::{self, Argument, Arguments};

/// A file of kernels, and the headers that precede it.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// File name, for error messages.
    pub name: &'static str,
    /// The kernels in the file.
    pub kernels: &'static [DeclaredKernel],
    /// Name and text of each header with declarations, and then of the file itself.
    text: &'static [(&'static str, &'static str)],
}

impl Source {
    /// The whole text. Its `#line` directives make the compiler's messages name the files and lines of this folder.
    pub(super) fn text(&self) -> String {
        self.text.iter().map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect()
    }
}

/// A kernel's name in the source, and the arguments with which it is launched.
#[derive(Clone, Copy, Debug)]
pub struct DeclaredKernel {
    /// Name in the source.
    pub name: &'static str,
    pub(super) arguments: &'static [Argument],
}

/// The names of all kernels.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    SOURCES.iter().flat_map(|source| source.kernels).map(|kernel| kernel.name)
}

/// A kernel that takes the arguments `A`.
pub(super) struct Kernel<A> {
    /// Index among the kernels of all sources.
    pub(super) index: usize,
    pub(super) name: &'static str,
    arguments: PhantomData<fn(A)>,
}

impl<A> Kernel<A> {
    /// The kernel at `index`. Only the macro `kernels` below calls this function, and it passes the kernel's own
    /// arguments as `A`.
    pub(super) const fn declared(index: usize, name: &'static str) -> Self {
        Self { index, name, arguments: PhantomData }
    }
}

// Derived implementations would require the same traits of `A`.
impl<A> Clone for Kernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Kernel<A> {}

/// Declares the kernels of each source, with the source's headers. All kernels before a colon take the arguments behind
/// it.
macro_rules! kernels {
    ($($file:literal [$($header:literal),*] { $($($kernel:ident),+: $arguments:ident;)+ })+) => {
        /// All files of kernels.
        pub const SOURCES: &[Source] = &[$(Source {
            name: $file,
            kernels: &[$($(DeclaredKernel {
                name: stringify!($kernel),
                arguments: arguments::$arguments::LIST,
            },)+)+],
            text: &[
                $(($header, include_str!(concat!("sources/", $header))),)*
                ($file, include_str!(concat!("sources/", $file))),
            ],
        },)+];

        /// The kernels of all sources, in the order of their declarations.
        #[allow(non_camel_case_types, reason = "the names are those of the sources")]
        enum Index { $($($($kernel,)+)+)+ }

        /// The kernels, each under its name in the source.
        #[allow(non_upper_case_globals, reason = "the names are those of the sources")]
        pub(super) mod kernel {
            use super::{Index, Kernel, arguments};

            $($($(pub(in crate::cuda) const $kernel: Kernel<arguments::$arguments> =
                Kernel::declared(Index::$kernel as usize, stringify!($kernel));)+)+)+
        }
    };
}

kernels! {
    "rms_norm.cu" ["prelude.cuh"] {
        rms_norm_f32, rms_norm_bf16, rms_norm_f16: RmsNorm;
    }
    "rows.cu" ["prelude.cuh"] {
        cast_bf16, cast_f16: Cast;
        add: Add;
        add_bias: AddBias;
        gated_f32: Gated;
        gated_bf16: Gated;
        gated_f16: Gated;
        sigmoid_gate: SigmoidGate;
        keep_rows: KeepRows;
    }
    "embed.cu" ["prelude.cuh", "e4m3.cuh", "codes.cuh"] {
        embed_f32, embed_bf16, embed_f16: Embed;
        embed_int4, embed_int8, embed_e4m3, embed_e2m1: EmbedCodes;
    }
    "products.cu" ["prelude.cuh", "mma.cuh", "e4m3.cuh", "codes.cuh", "codes_tiles.cuh"] {
        multiply_narrow_int4, multiply_narrow_int8, multiply_narrow_e4m3, multiply_narrow_e2m1: MultiplyCodes;
        multiply_wide_int4, multiply_wide_int8, multiply_wide_e4m3, multiply_wide_e2m1: MultiplyCodes;
        sum_splits: SumSplits;
    }
    "rotate.cu" ["prelude.cuh", "e4m3.cuh"] {
        rope_angles: RopeAngles;
        rotate_and_store_f32, rotate_and_store_bf16, rotate_and_store_f16, rotate_and_store_fp8: RotateAndStore;
    }
    "attention.cu" ["prelude.cuh", "e4m3.cuh"] {
        attention_f32, attention_bf16, attention_f16, attention_fp8: Attention;
    }
    "attention_tiles.cu" ["prelude.cuh", "mma.cuh", "e4m3.cuh"] {
        narrow_bf16_32, narrow_bf16_64, narrow_bf16_128, narrow_f16_32, narrow_f16_64, narrow_f16_128: AttentionTiles;
        wide_bf16_32, wide_bf16_64, wide_bf16_128, wide_f16_32, wide_f16_64, wide_f16_128: AttentionTiles;
        narrow_fp8_bf16_32, narrow_fp8_bf16_64, narrow_fp8_bf16_128: AttentionTiles;
        narrow_fp8_f16_32, narrow_fp8_f16_64, narrow_fp8_f16_128: AttentionTiles;
        wide_fp8_bf16_32, wide_fp8_bf16_64, wide_fp8_bf16_128: AttentionTiles;
        wide_fp8_f16_32, wide_fp8_f16_64, wide_fp8_f16_128: AttentionTiles;
        merge_splits_32, merge_splits_64, merge_splits_128: MergeSplits;
    }
    "route.cu" ["prelude.cuh"] {
        route_rows: RouteRows;
        group_rows: GroupRows;
        sum_experts: SumExperts;
    }
    "experts.cu" ["prelude.cuh", "experts.cuh"] {
        expert_gates_f32, expert_gates_bf16, expert_gates_f16: MultiplyExperts;
        expert_outputs_f32, expert_outputs_bf16, expert_outputs_f16: MultiplyExperts;
    }
    "experts_tiles.cu" ["prelude.cuh", "mma.cuh", "experts.cuh"] {
        expert_gates_narrow_bf16, expert_gates_narrow_f16: MultiplyExperts;
        expert_gates_wide_bf16, expert_gates_wide_f16: MultiplyExperts;
        expert_outputs_narrow_bf16, expert_outputs_narrow_f16: MultiplyExperts;
        expert_outputs_wide_bf16, expert_outputs_wide_f16: MultiplyExperts;
    }
    "experts_codes.cu" ["prelude.cuh", "mma.cuh", "experts.cuh", "e4m3.cuh", "codes.cuh", "codes_tiles.cuh"] {
        experts_narrow_int4, experts_narrow_int8, experts_narrow_e4m3, experts_narrow_e2m1: MultiplyExpertCodes;
        experts_wide_int4, experts_wide_int8, experts_wide_e4m3, experts_wide_e2m1: MultiplyExpertCodes;
    }
    "recurrence.cu" ["prelude.cuh"] {
        decayed_sum: DecayedSum;
    }
    "delta_inputs.cu" ["prelude.cuh"] {
        delta_inputs: DeltaInputs;
    }
    "delta_rule.cu" ["prelude.cuh", "mma.cuh"] {
        delta_rule_32, delta_rule_64, delta_rule_128, delta_rule_256: DeltaRule;
    }
    "gated_norm.cu" ["prelude.cuh"] {
        gated_norm: GatedNorm;
    }
    "encoder.cu" ["prelude.cuh"] {
        layer_norm: LayerNorm;
        gelu_exact, gelu_tanh: Gelu;
        rotate_heads: RotateHeads;
        gather_convolution: GatherConvolution;
    }
    "segment_attention.cu" ["prelude.cuh", "mma.cuh"] {
        segment_attention_32, segment_attention_64, segment_attention_80, segment_attention_128: SegmentAttention;
    }
    "argmax.cu" ["prelude.cuh", "logits.cuh"] {
        argmax: Argmax;
        partial_argmax: PartialArgmax;
        best_candidates: BestCandidates;
    }
    "sample.cu" ["prelude.cuh", "logits.cuh"] {
        sample: Sample;
        sample_candidates: SampleCandidates;
        score_tokens: ScoreTokens;
    }
    "nominate.cu" ["prelude.cuh", "logits.cuh"] {
        adjust_shard: AdjustShard;
        merge_peaks: MergePeaks;
        nominate: Nominate;
        merge_nominated: MergeNominated;
    }
    "collectives.cu" ["prelude.cuh"] {
        pack_rows: PackRows;
        lay_side_by_side: LaySideBySide;
        to_keys, from_keys: Keys;
    }
}

#[cfg(test)]
mod tests;
