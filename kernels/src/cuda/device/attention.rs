//! Rotation, storing of keys and values, and attention over pages.

use super::CudaDevice;
use crate::cuda::kernels::{Grid, arguments};
use crate::cuda::planes::Planes;
use crate::cuda::tensor::{Tensor, Vector};
use crate::{
    Attention, AttentionShape, DeviceError, PagedAttention, RopeFrequencies, Rotary, RotateAndStore,
    WeightType,
};

/// Threads of a block of all kernels here: four warps.
const THREADS: u32 = 128;
/// Warps of a block.
const WARPS: usize = 4;

/// Rotary frequencies, and their copy on the device.
pub(super) struct RopeOnDevice {
    rope: RopeFrequencies,
    inverse: Vector,
    /// Axis of each frequency, as the bits of an f32 each; `None` if all take the first axis.
    axes: Option<Vector>,
}

impl PagedAttention for CudaDevice {
    fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut Tensor) -> Result<(), DeviceError> {
        let half = rope.inverse.len();
        let known = rope.axes.iter().all(|&axis| axis < 3);
        if !known || (!rope.axes.is_empty() && rope.axes.len() != half) {
            let axes = &rope.axes;
            return Err(DeviceError::Misuse(format!("axes {axes:?} of {half} rotary frequencies")));
        }
        let tokens = self.step.tokens;
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
        let (tokens, rotated) = (self.step.tokens, angles.width);
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
        let tokens = self.step.tokens;
        qkv.check(tokens, (heads + 2 * kv_heads) * head_dim)?;
        out.written(tokens, heads * head_dim)?;
        let name = match pool.dtype {
            WeightType::F32 => "attention_f32",
            WeightType::Bf16 => "attention_bf16",
            WeightType::F16 => "attention_f16",
        };
        let at = self.step.at;
        let window = window.and_then(|window| u32::try_from(window).ok()).unwrap_or(u32::MAX);
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

impl CudaDevice {
    /// Refuses a step that began over planes without pages: no page holds its tokens.
    fn check_pages(&self) -> Result<(), DeviceError> {
        match self.step.has_pages {
            true => Ok(()),
            false => Err(DeviceError::Misuse("a step that began without pages".to_owned())),
        }
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
