//! Operations of encoders: checks of the operands, and dispatch to the kernels.

use super::CpuDevice;
use crate::cpu::encoder::attention::attention;
use crate::cpu::encoder::convolution::{self, WINDOW};
use crate::cpu::encoder::rows::{ApplyGelu, LayerNorm as NormOfRow, rotate};
use crate::cpu::memory::{Tensor, Vector};
use crate::cpu::rowwise::each_row;
use crate::{DeviceError, Encoder, EncoderHeads, Gelu, LayerNorm, PixelGrid, SegmentAttention};

impl Encoder for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn layer_norm(
        &mut self,
        x: &Tensor,
        norm: LayerNorm<'_, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (width, eps, path) = (x.width(), norm.eps, self.path);
        let (weight, bias) = (norm.weight.read(width)?, norm.bias.read(width)?);
        let (x, out) = (x.values(), out.written(x.live(), width)?);
        each_row(&mut self.pool, out, width, |row, out| {
            path.run(NormOfRow { x: &x[row * width..][..width], weight, bias, eps, out });
        })
    }

    fn gelu(&mut self, form: Gelu, x: &mut Tensor) -> Result<(), DeviceError> {
        let (width, path) = (x.width(), self.path);
        each_row(&mut self.pool, x.values_mut(), width, |_, x| path.run(ApplyGelu { form, x }))
    }

    fn rotate_heads(
        &mut self,
        shape: EncoderHeads,
        angles: &Tensor,
        qkv: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (width, head_dim) = (check(shape)?, shape.head_dim);
        if !head_dim.is_multiple_of(2) || angles.live() != qkv.live() {
            let (rows, of) = (angles.live(), qkv.live());
            return Err(DeviceError::Misuse(format!("angles of {rows} rows for {of} rows of {shape:?}")));
        }
        let angles = angles.read(head_dim)?;
        let qkv = qkv.change(qkv.live(), 3 * width)?;
        each_row(&mut self.pool, qkv, 3 * width, |row, qkv| {
            rotate(&mut qkv[..2 * width], head_dim, &angles[row * head_dim..][..head_dim]);
        })
    }

    fn segment_attention(
        &mut self,
        SegmentAttention { qkv, shape, segments }: SegmentAttention<'_, Tensor>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let width = check(shape)?;
        let mut end = 0;
        let follows = |rows: &std::ops::Range<usize>| {
            rows.start == end && rows.end > rows.start && {
                end = rows.end;
                true
            }
        };
        if !segments.iter().all(follows) || end != qkv.live() {
            let rows = qkv.live();
            return Err(DeviceError::Misuse(format!("segments that are not the {rows} rows of attention")));
        }
        let (x, out) = (qkv.read(3 * width)?, out.written(qkv.live(), width)?);
        attention((self.path, &mut self.pool, &mut self.segments), x, shape, segments, out)
    }

    fn gather_convolution(
        &mut self,
        grid: PixelGrid,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (channels, rows) = (x.width(), grid.halved().pixels());
        if grid.pixels() != x.live() {
            return Err(DeviceError::Misuse(format!("{} rows for the pixels of {grid:?}", x.live())));
        }
        let (x, out) = (x.values(), out.written(rows, channels * WINDOW)?);
        each_row(&mut self.pool, out, channels * WINDOW, |row, out| {
            convolution::gather(grid, x, channels, row, out);
        })
    }

    fn join_rows(&mut self, x: &Tensor, out: &mut Tensor) -> Result<(), DeviceError> {
        let values = x.values();
        if out.width() == 0 || !out.width().is_multiple_of(x.width().max(1)) {
            let (from, to) = (x.width(), out.width());
            return Err(DeviceError::Misuse(format!("rows of {from} joined to rows of {to}")));
        }
        out.fill(values)
    }

    fn add_rows(&mut self, out: &mut Tensor, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        let (width, live) = (out.width(), out.live());
        let start = first.saturating_mul(width);
        match out.values_mut().get_mut(start..start.saturating_add(values.len())) {
            Some(out) if width > 0 && values.len().is_multiple_of(width) => {
                out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
                Ok(())
            }
            _ => {
                let count = values.len();
                Err(DeviceError::Misuse(format!(
                    "{count} values from row {first} on for {live} rows of {width}"
                )))
            }
        }
    }
}

/// Returns the width of all heads of q. Refuses an attention without heads.
fn check(shape: EncoderHeads) -> Result<usize, DeviceError> {
    match shape.heads.checked_mul(shape.head_dim) {
        Some(width) if width > 0 => Ok(width),
        _ => Err(DeviceError::Misuse(format!("attention of {shape:?}"))),
    }
}
