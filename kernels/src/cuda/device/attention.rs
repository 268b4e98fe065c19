//! Rotation, storing of keys and values, and attention over pages.

use super::CudaDevice;
use crate::cuda::attention_work::{ITEM_WORDS, WorkShape};
use crate::cuda::kernels::{Grid, arguments};
use crate::cuda::memory::grown;
use crate::cuda::planes::Planes;
use crate::cuda::tensor::{Tensor, Vector};
use crate::{
    Attention, AttentionShape, DeviceError, KvShape, PagedAttention, RopeFrequencies, Rotary, RotateAndStore,
    WeightType,
};

/// Threads of a block of all kernels here: four warps.
const THREADS: u32 = 128;
/// Warps of a block.
const WARPS: usize = 4;
/// Threads of a warp.
const WARP: u32 = 32;
/// Scratch memory for partial results of attention. Tiles for which no room is left walk their splits one after
/// another.
const PART_BYTES: usize = 32 << 20;
/// Alignment in bytes of what a thread reads at once.
const ALIGNMENT: usize = 16;

/// Rotary frequencies, and their copy on the device.
pub(super) struct RopeOnDevice {
    rope: RopeFrequencies,
    inverse: Vector,
    /// Axis of each frequency, as the bits of an f32 each; `None` if all take the first axis.
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
        let operands = arguments![
            self.step.at.positions,
            tokens as u32,
            inverse,
            axes,
            half as u32,
            rope.scale,
            out.at()
        ];
        self.kernels.launch("rope_angles", Grid::over(tokens * half, THREADS), operands)
    }

    fn rotate_and_store(
        &mut self,
        operands: RotateAndStore<'_, Tensor, Vector, Planes>,
    ) -> Result<(), DeviceError> {
        let RotateAndStore { qkv, shape, norms, rotary: Rotary { angles }, planes, layer } = operands;
        let (kv, pool) = planes.layer(layer, &shape)?;
        self.check_pages()?;
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let (q_norm, k_norm, eps) = match norms {
            Some(norms) => (norms.q.read(head_dim)?, norms.k.read(head_dim)?, norms.eps),
            None => (0, 0, 0.0),
        };
        let (tokens, rotated) = (self.step.token_rows, angles.width);
        if rotated == 0 || rotated > head_dim || !rotated.is_multiple_of(2) {
            return Err(DeviceError::Misuse(format!("angles for {rotated} elements of heads of {head_dim}")));
        }
        if angles.live != tokens {
            return Err(DeviceError::Misuse("rotary angles of another step".to_owned()));
        }
        qkv.check(tokens, (heads + 2 * kv_heads) * head_dim)?;
        let name = match pool.dtype {
            WeightType::F32 => "rotate_and_store_f32",
            WeightType::Bf16 => "rotate_and_store_bf16",
            WeightType::F16 => "rotate_and_store_f16",
        };
        let operands = arguments![
            qkv.at(),
            angles.at(),
            q_norm,
            k_norm,
            self.step.at.kv_at,
            kv,
            eps,
            tokens as u32,
            heads as u32,
            kv_heads as u32,
            head_dim as u32,
            rotated as u32,
            pool.page_tokens as u32,
        ];
        let items = tokens * (heads + 2 * kv_heads);
        self.kernels.launch(name, Grid::of(items.div_ceil(WARPS), THREADS), operands)
    }

    fn attention(
        &mut self,
        attention: Attention<'_, Tensor, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let Attention { qkv, shape, planes, layer } = attention;
        let (kv, pool) = planes.layer(layer, &shape)?;
        self.check_pages()?;
        let AttentionShape { heads, kv_heads, head_dim, scale, window } = shape;
        let tokens = self.step.token_rows;
        qkv.check(tokens, (heads + 2 * kv_heads) * head_dim)?;
        out.written(tokens, heads * head_dim)?;
        // Distances between positions have 32 bits with a sign in the kernels.
        let window = window.unwrap_or(usize::MAX).min(i32::MAX as usize) as u32;
        if let Some(tiles) = Tiles::of(pool.dtype, head_dim) {
            // No tile has padding.
            out.clear_from(self.step.tokens)?;
            return self.attention_on_tensor_cores(
                &tiles,
                &Heads { qkv: qkv.at(), shape, window, kv, pool },
                out,
            );
        }
        let name = match pool.dtype {
            WeightType::F32 => "attention_f32",
            WeightType::Bf16 => "attention_bf16",
            WeightType::F16 => "attention_f16",
        };
        let at = self.step.at;
        let operands = arguments![
            qkv.at(),
            at.rows,
            at.row_of,
            at.kv_at,
            at.pages,
            out.at(),
            tokens as u32,
            heads as u32,
            kv_heads as u32,
            head_dim as u32,
            pool.page_tokens as u32,
            window,
            scale,
            kv,
        ];
        let blocks = ((tokens * heads).div_ceil(WARPS), 1);
        let grid = Grid { blocks, threads: THREADS, shared_bytes: WARPS * head_dim * size_of::<f32>() };
        self.kernels.launch(name, grid, operands)
    }
}

/// The kernels of `sources/attention_tiles.cu` for a type and a size of heads.
struct Tiles {
    narrow: &'static str,
    wide: &'static str,
    merge: &'static str,
}

impl Tiles {
    /// `None` if the plain kernel computes such heads.
    fn of(dtype: WeightType, head_dim: usize) -> Option<Self> {
        let (narrow, wide, merge) = match (dtype, head_dim) {
            (WeightType::Bf16, 32) => ("narrow_bf16_32", "wide_bf16_32", "merge_splits_32"),
            (WeightType::Bf16, 64) => ("narrow_bf16_64", "wide_bf16_64", "merge_splits_64"),
            (WeightType::Bf16, 128) => ("narrow_bf16_128", "wide_bf16_128", "merge_splits_128"),
            (WeightType::F16, 32) => ("narrow_f16_32", "wide_f16_32", "merge_splits_32"),
            (WeightType::F16, 64) => ("narrow_f16_64", "wide_f16_64", "merge_splits_64"),
            (WeightType::F16, 128) => ("narrow_f16_128", "wide_f16_128", "merge_splits_128"),
            _ => return None,
        };
        Some(Self { narrow, wide, merge })
    }
}

/// The checked operands of attention on tensor cores.
struct Heads {
    qkv: u64,
    shape: AttentionShape,
    window: u32,
    kv: u64,
    pool: KvShape,
}

impl CudaDevice {
    /// Refuses a step that began over planes without pages: no page holds its tokens.
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
        let AttentionShape { heads, kv_heads, head_dim, scale, .. } = of.shape;
        // A partial result: the greatest score, the sum of weights, the weighted sum of values.
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
        let part_values = part_sums + sums_bytes.next_multiple_of(ALIGNMENT) as u64;
        let lists = [
            (tiles.wide, &work.wide, 4 * WARP, work.narrow.len()),
            (tiles.narrow, &work.narrow, WARP, 0),
            (tiles.merge, &work.merges, THREADS, work.narrow.len() + work.wide.len()),
        ];
        for (name, items, threads, before) in lists {
            let operands = arguments![
                of.qkv,
                at.rows,
                work.at + (before * ITEM_WORDS * size_of::<u32>()) as u64,
                at.kv_at,
                at.pages,
                out.at(),
                part_sums,
                part_values,
                work.parts as u32,
                heads as u32,
                kv_heads as u32,
                of.pool.page_tokens as u32,
                of.window,
                scale,
                of.kv,
            ];
            // The merge has no pages.
            let count = operands.len() - usize::from(name == tiles.merge);
            let grid = Grid { blocks: (items.len(), kv_heads), threads, shared_bytes: 0 };
            self.kernels.launch(name, grid, &operands[..count])?;
        }
        Ok(())
    }

    /// Addresses of the inverse frequencies and of their axes, 0 without axes.
    fn rope_on_device(&mut self, rope: &RopeFrequencies) -> Result<(u64, u64), DeviceError> {
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
        Ok((known.inverse.read(half)?, axes.unwrap_or(0)))
    }
}
