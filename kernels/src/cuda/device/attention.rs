//! Rotation, storing of keys and values, and attention over pages.

use super::CudaDevice;
use crate::cuda::arguments::{self, AttentionTiles, MergeSplits, RopeAngles};
use crate::cuda::attention_work::WorkShape;
use crate::cuda::kernels::Grid;
use crate::cuda::memory::{DevicePointer, grown};
use crate::cuda::planes::{LayerPages, Planes};
use crate::cuda::records::Item;
use crate::cuda::sources::{Kernel, kernel};
use crate::cuda::tensor::{Tensor, Vector};
use crate::{
    Attention, AttentionShape, DeviceError, KvShape, KvType, PagedAttention, RopeFrequencies, Rotary,
    RotateAndStore, WeightType,
};

/// Threads per block of all kernels here: four warps.
const THREADS: u32 = 128;
/// Warps per thread block.
const WARPS: usize = 4;
/// Threads per warp.
const WARP: u32 = 32;
/// Size in bytes of the scratch memory for partial results of attention. If a tile's partial results do not fit, its
/// splits (ranges of keys) are computed one after another.
const PART_BYTES: usize = 32 << 20;
/// Number of bytes that a thread reads at once: the alignment of all operands.
const ALIGNMENT: usize = 16;

/// Rotary frequencies, and their copy on the device.
pub(super) struct RopeOnDevice {
    rope: RopeFrequencies,
    inverse: Vector,
    /// Axis of each frequency, stored in the bits of an f32; `None` if all frequencies use the first axis.
    axes: Option<Vector>,
}

impl PagedAttention for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut Tensor) -> Result<(), DeviceError> {
        let half = rope.inverse.len();
        let known = rope.axes.iter().all(|&axis| axis < 3);
        if !known || (!rope.axes.is_empty() && rope.axes.len() != half) {
            let axes = &rope.axes;
            return Err(DeviceError::Misuse(format!("axes {axes:?} of {half} rotary frequencies")));
        }
        let tokens = self.step.token_rows;
        out.written(tokens, 2 * half)?;
        let (inverse, axes) = self.rope_on_device(rope)?;
        let operands = RopeAngles {
            positions: self.step.at.positions,
            tokens: tokens as u32,
            inverse,
            axes,
            half: half as u32,
            scale: rope.scale,
            out: out.at(),
        };
        self.kernels.launch(kernel::rope_angles, Grid::over(tokens * half, THREADS), operands)
    }

    fn rotate_and_store(
        &mut self,
        operands: RotateAndStore<'_, Tensor, Vector, Planes>,
    ) -> Result<(), DeviceError> {
        let RotateAndStore { qkv, shape, norms, rotary: Rotary { angles }, planes, layer } = operands;
        let LayerPages { at: kv, pool, scales } = planes.layer(layer, &shape)?;
        self.check_pages()?;
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let (q_norm, k_norm, eps) = match norms {
            Some(norms) => (norms.q.read(head_dim)?, norms.k.read(head_dim)?, norms.eps),
            None => (DevicePointer::NULL, DevicePointer::NULL, 0.0),
        };
        let (tokens, rotated) = (self.step.token_rows, angles.width);
        if rotated == 0 || rotated > head_dim || !rotated.is_multiple_of(2) {
            return Err(DeviceError::Misuse(format!("angles for {rotated} elements of heads of {head_dim}")));
        }
        if angles.live != tokens {
            return Err(DeviceError::Misuse("rotary angles of another step".to_owned()));
        }
        qkv.check(tokens, (heads + 2 * kv_heads) * head_dim)?;
        let kernel = match pool.dtype {
            KvType::Full(WeightType::F32) => kernel::rotate_and_store_f32,
            KvType::Full(WeightType::Bf16) => kernel::rotate_and_store_bf16,
            KvType::Full(WeightType::F16) => kernel::rotate_and_store_f16,
            KvType::Fp8(_) => kernel::rotate_and_store_fp8,
        };
        let operands = arguments::RotateAndStore {
            qkv: qkv.at(),
            angles: angles.at(),
            q_norm,
            k_norm,
            kv_at: self.step.at.kv_at,
            kv,
            eps,
            tokens: tokens as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            rotated: rotated as u32,
            page_tokens: pool.page_tokens as u32,
            key_scale: scales.key,
            value_scale: scales.value,
        };
        let items = tokens * (heads + 2 * kv_heads);
        self.kernels.launch(kernel, Grid::of(items.div_ceil(WARPS), THREADS), operands)
    }

    fn attention(
        &mut self,
        attention: Attention<'_, Tensor, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let Attention { qkv, shape, planes, layer } = attention;
        let LayerPages { at: kv, pool, scales } = planes.layer(layer, &shape)?;
        self.check_pages()?;
        let AttentionShape { heads, kv_heads, head_dim, window, .. } = shape;
        let tokens = self.step.token_rows;
        qkv.check(tokens, (heads + 2 * kv_heads) * head_dim)?;
        out.written(tokens, heads * head_dim)?;
        // The kernels compute distances between positions as signed 32-bit integers.
        let window = window.unwrap_or(usize::MAX).min(i32::MAX as usize) as u32;
        let scale = shape.scale * scales.key;
        if let Some(tiles) = Tiles::of(pool.dtype, head_dim) {
            // Tiles do not cover padding, so padding rows are cleared here.
            out.clear_from(self.step.tokens)?;
            return self.attention_on_tensor_cores(
                &tiles,
                &Heads { qkv: qkv.at(), shape, window, scale, value_scale: scales.value, kv, pool },
                out,
            );
        }
        let kernel = match pool.dtype {
            KvType::Full(WeightType::F32) => kernel::attention_f32,
            KvType::Full(WeightType::Bf16) => kernel::attention_bf16,
            KvType::Full(WeightType::F16) => kernel::attention_f16,
            KvType::Fp8(_) => kernel::attention_fp8,
        };
        let at = self.step.at;
        let operands = arguments::Attention {
            qkv: qkv.at(),
            rows: at.rows,
            row_of: at.row_of,
            kv_at: at.kv_at,
            pages: at.pages,
            out: out.at(),
            tokens: tokens as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            page_tokens: pool.page_tokens as u32,
            window,
            scale,
            value_scale: scales.value,
            kv,
        };
        let blocks = ((tokens * heads).div_ceil(WARPS), 1);
        let grid = Grid { blocks, threads: THREADS, shared_bytes: WARPS * head_dim * size_of::<f32>() };
        self.kernels.launch(kernel, grid, operands)
    }
}

/// The kernels of `sources/attention_tiles.cu` for one type and one head size.
struct Tiles {
    narrow: Kernel<AttentionTiles>,
    wide: Kernel<AttentionTiles>,
    merge: Kernel<MergeSplits>,
}

impl Tiles {
    /// Returns the kernels for a type and a head size; `None` if only the plain kernel supports them.
    fn of(dtype: KvType, head_dim: usize) -> Option<Self> {
        use WeightType::{Bf16, F16};
        let (narrow, wide, merge) = match (dtype, head_dim) {
            (KvType::Full(Bf16), 32) => {
                (kernel::narrow_bf16_32, kernel::wide_bf16_32, kernel::merge_splits_32)
            }
            (KvType::Full(Bf16), 64) => {
                (kernel::narrow_bf16_64, kernel::wide_bf16_64, kernel::merge_splits_64)
            }
            (KvType::Full(Bf16), 128) => {
                (kernel::narrow_bf16_128, kernel::wide_bf16_128, kernel::merge_splits_128)
            }
            (KvType::Full(F16), 32) => (kernel::narrow_f16_32, kernel::wide_f16_32, kernel::merge_splits_32),
            (KvType::Full(F16), 64) => (kernel::narrow_f16_64, kernel::wide_f16_64, kernel::merge_splits_64),
            (KvType::Full(F16), 128) => {
                (kernel::narrow_f16_128, kernel::wide_f16_128, kernel::merge_splits_128)
            }
            (KvType::Fp8(Bf16), 32) => {
                (kernel::narrow_fp8_bf16_32, kernel::wide_fp8_bf16_32, kernel::merge_splits_32)
            }
            (KvType::Fp8(Bf16), 64) => {
                (kernel::narrow_fp8_bf16_64, kernel::wide_fp8_bf16_64, kernel::merge_splits_64)
            }
            (KvType::Fp8(Bf16), 128) => {
                (kernel::narrow_fp8_bf16_128, kernel::wide_fp8_bf16_128, kernel::merge_splits_128)
            }
            (KvType::Fp8(F16), 32) => {
                (kernel::narrow_fp8_f16_32, kernel::wide_fp8_f16_32, kernel::merge_splits_32)
            }
            (KvType::Fp8(F16), 64) => {
                (kernel::narrow_fp8_f16_64, kernel::wide_fp8_f16_64, kernel::merge_splits_64)
            }
            (KvType::Fp8(F16), 128) => {
                (kernel::narrow_fp8_f16_128, kernel::wide_fp8_f16_128, kernel::merge_splits_128)
            }
            _ => return None,
        };
        Some(Self { narrow, wide, merge })
    }
}

/// The checked operands of attention on tensor cores.
struct Heads {
    qkv: DevicePointer<f32>,
    shape: AttentionShape,
    window: u32,
    /// Factor of the scores, and factor of the results.
    scale: f32,
    value_scale: f32,
    kv: DevicePointer<u8>,
    pool: KvShape,
}

impl CudaDevice {
    /// Returns an error if the step began over planes without pages, because no page holds its tokens.
    fn check_pages(&self) -> Result<(), DeviceError> {
        match self.step.has_pages {
            true => Ok(()),
            false => Err(DeviceError::Misuse("a step that began without pages".to_owned())),
        }
    }

    fn attention_on_tensor_cores(
        &mut self,
        tiles: &Tiles,
        of: &Heads,
        out: &Tensor,
    ) -> Result<(), DeviceError> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = of.shape;
        // Size of a partial result: the largest score, the sum of weights and the weighted sum of values.
        let part_bytes = (2 + head_dim) * size_of::<f32>();
        let shape =
            WorkShape { group: heads / kv_heads, kv_heads, parts: PART_BYTES / (part_bytes * kv_heads) };
        let scratch = grown(
            &mut self.scratch.parts,
            &self.gpu,
            PART_BYTES + ALIGNMENT,
            "partial results of attention",
        )?;
        let at = self.step.at;
        let work = self.step.attention_work(shape, &mut self.inputs)?;
        let part_sums = scratch.at();
        let sums_bytes = work.parts * kv_heads * 2 * size_of::<f32>();
        let part_values = part_sums.add_bytes(sums_bytes.next_multiple_of(ALIGNMENT));
        let lists =
            [(tiles.wide, &work.wide, 4 * WARP, work.narrow.len()), (tiles.narrow, &work.narrow, WARP, 0)];
        let grid =
            |items: &[Item], threads| Grid { blocks: (items.len(), kv_heads), threads, shared_bytes: 0 };
        // The lists are stored one after another. `before` is the number of items in front of a list.
        let merge = |before: usize| MergeSplits {
            qkv: of.qkv,
            rows: at.rows,
            items: work.at.add(before),
            kv_at: at.kv_at,
            pages: at.pages,
            out: out.at(),
            part_sums,
            part_values,
            parts: work.parts as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            page_tokens: of.pool.page_tokens as u32,
            window: of.window,
            scale: of.scale,
            value_scale: of.value_scale,
        };
        for (kernel, items, threads, before) in lists {
            let operands = merge(before).with_pages(of.kv);
            self.kernels.launch(kernel, grid(items, threads), operands)?;
        }
        let before = work.narrow.len() + work.wide.len();
        self.kernels.launch(tiles.merge, grid(&work.merges, THREADS), merge(before))
    }

    /// Returns the addresses of the inverse frequencies and of their axes. Without axes, the second address is null.
    fn rope_on_device(
        &mut self,
        rope: &RopeFrequencies,
    ) -> Result<(DevicePointer<f32>, DevicePointer<u32>), DeviceError> {
        let half = rope.inverse.len();
        if !self.ropes.iter().any(|known| known.rope == *rope) {
            let inverse = Vector::load(&self.gpu, &mut self.loader, &rope.inverse)?;
            let axes: Vec<f32> = rope.axes.iter().map(|&axis| f32::from_bits(u32::from(axis))).collect();
            let axes =
                (!axes.is_empty()).then(|| Vector::load(&self.gpu, &mut self.loader, &axes)).transpose()?;
            self.ropes.push(RopeOnDevice { rope: rope.clone(), inverse, axes });
        }
        let Some(known) = self.ropes.iter().find(|known| known.rope == *rope) else {
            return Err(DeviceError::Misuse("rotary frequencies that are not numbers".to_owned()));
        };
        let axes = known.axes.as_ref().map(|axes| axes.read(half)).transpose()?;
        Ok((known.inverse.read(half)?, axes.unwrap_or_default().cast()))
    }
}
