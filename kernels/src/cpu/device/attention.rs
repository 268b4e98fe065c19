//! Rotation, storing of keys and values, and attention over pages.

use super::CpuDevice;
use crate::cpu::attention;
use crate::cpu::attention::rotate::{self, Norms};
use crate::cpu::memory::{Planes, Tensor, Vector};
use crate::cpu::rowwise;
use crate::{
    Attention, AttentionShape, DeviceError, PagedAttention, RopeFrequencies, Rotary, RotateAndStore,
};

impl PagedAttention for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn rope_angles(&mut self, rope: &RopeFrequencies, out: &mut Tensor) -> Result<(), DeviceError> {
        let width = 2 * rope.inverse.len();
        let out = self.step.pad(out.written(self.step.token_rows(), width)?, width);
        rowwise::rope_angles(&mut self.pool, rope, &self.step.positions, out)
    }

    fn rotate_and_store(
        &mut self,
        operands: RotateAndStore<'_, Tensor, Vector, Planes>,
    ) -> Result<(), DeviceError> {
        let RotateAndStore { qkv, shape, norms, rotary: Rotary { angles }, planes, layer } = operands;
        let kv = planes.kv_mut()?;
        kv.check(layer, &shape)?;
        self.step.check_pages(kv.shape.page_tokens, kv.shape.pages)?;
        let norms = norms.map(|norms| {
            let (q, k) = (norms.q.read(shape.head_dim)?, norms.k.read(shape.head_dim)?);
            Ok::<_, DeviceError>(Norms { q, k, eps: norms.eps })
        });
        let norms = norms.transpose()?;
        let rows = self.step.token_rows();
        let rotated = angles.width();
        if rotated == 0 || rotated > shape.head_dim || !rotated.is_multiple_of(2) {
            let head_dim = shape.head_dim;
            return Err(DeviceError::Misuse(format!("angles for {rotated} elements of heads of {head_dim}")));
        }
        if angles.live() != rows {
            return Err(DeviceError::Misuse("rotary angles of another step".to_owned()));
        }
        let angles = angles.values();
        let qkv = qkv.change(rows, qkv_width(&shape))?;
        let operands = rotate::RotateAndStore { qkv, shape, norms, angles, rotated, kv, layer };
        rotate::rotate_and_store(self.path, &mut self.pool, &self.step, operands)
    }

    fn attention(
        &mut self,
        attention: Attention<'_, Tensor, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let Attention { qkv, shape, planes, layer } = attention;
        let kv = planes.kv()?;
        kv.check(layer, &shape)?;
        self.step.check_pages(kv.shape.page_tokens, kv.shape.pages)?;
        let rows = self.step.token_rows();
        if qkv.live() != rows {
            return Err(DeviceError::Misuse(format!("{} rows of qkv for {rows} tokens", qkv.live())));
        }
        let qkv = qkv.read(qkv_width(&shape))?;
        let width = shape.heads * shape.head_dim;
        let out = self.step.pad(out.written(rows, width)?, width);
        let operands = attention::Attention { qkv, shape, kv, layer, out };
        attention::attention(self.path, &mut self.pool, &self.step, &mut self.attention, operands)
    }
}

/// Number of elements of one token's fused queries, keys and values.
fn qkv_width(shape: &AttentionShape) -> usize {
    (shape.heads + 2 * shape.kv_heads) * shape.head_dim
}
