//! Operations of encoders of pictures and sound. They run outside of steps, except for the addition of features.

use std::ops::Range;

use super::CudaDevice;
use crate::cuda::arguments;
use crate::cuda::kernels::Grid;
use crate::cuda::memory::{DevicePointer, grown};
use crate::cuda::records::{Record, SegmentTile};
use crate::cuda::sources::{Kernel, kernel};
use crate::cuda::tensor::{Tensor, Vector};
use crate::{DeviceError, Encoder, EncoderHeads, Gelu, LayerNorm, PixelGrid, SegmentAttention};

/// Threads per block, except for attention.
const THREADS: u32 = 256;
/// Elements of a window of a convolution, per channel.
const WINDOW: usize = 9;
/// Largest number of values that are added to rows at once.
const ADDED_AT_ONCE: usize = super::MOST_STAGED_BYTES / size_of::<f32>();

impl Encoder for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn layer_norm(
        &mut self,
        x: &Tensor,
        norm: LayerNorm<'_, Vector>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (weight, bias) = (norm.weight.read(x.width)?, norm.bias.read(x.width)?);
        out.written_like(x, x.width)?;
        let width = x.width as u32;
        let operands = arguments::LayerNorm { x: x.at(), weight, bias, eps: norm.eps, width, out: out.at() };
        self.kernels.launch(kernel::layer_norm, Grid::of(x.live, THREADS), operands)
    }

    fn gelu(&mut self, form: Gelu, x: &mut Tensor) -> Result<(), DeviceError> {
        let kernel = match form {
            Gelu::Exact => kernel::gelu_exact,
            Gelu::Tanh => kernel::gelu_tanh,
        };
        let operands = arguments::Gelu { count: x.elements() as u64, x: x.at() };
        self.kernels.launch(kernel, Grid::over(x.elements().div_ceil(4), THREADS), operands)
    }

    fn rotate_heads(
        &mut self,
        shape: EncoderHeads,
        angles: &Tensor,
        qkv: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let (width, head_dim) = (check(shape)?, shape.head_dim);
        if !head_dim.is_multiple_of(2) || angles.live != qkv.live {
            let (rows, of) = (angles.live, qkv.live);
            return Err(DeviceError::Misuse(format!("angles of {rows} rows for {of} rows of {shape:?}")));
        }
        angles.check_width(head_dim)?;
        qkv.check_width(3 * width)?;
        let operands = arguments::RotateHeads {
            angles: angles.at(),
            heads: shape.heads as u32,
            head_dim: head_dim as u32,
            qkv: qkv.at(),
        };
        self.kernels.launch(kernel::rotate_heads, Grid::of(qkv.live, THREADS), operands)
    }

    fn segment_attention(
        &mut self,
        SegmentAttention { qkv, shape, segments }: SegmentAttention<'_, Tensor>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let width = check(shape)?;
        let mut end = 0;
        let follows = |rows: &Range<usize>| {
            rows.start == end && rows.end > rows.start && {
                end = rows.end;
                true
            }
        };
        if !segments.iter().all(follows) || end != qkv.live {
            let rows = qkv.live;
            return Err(DeviceError::Misuse(format!("segments that are not the {rows} rows of attention")));
        }
        qkv.check_width(3 * width)?;
        let (kernel, queries) = tiled(shape)?;
        out.written(qkv.live, width)?;
        let tiles: Vec<SegmentTile> = segments
            .iter()
            .flat_map(|rows| rows.clone().step_by(queries).map(move |query| (rows, query)))
            .map(|(rows, query)| SegmentTile {
                first: rows.start as u32,
                end: rows.end as u32,
                query: query as u32,
            })
            .collect();
        let words: Vec<u32> = tiles.iter().flat_map(|tile| tile.words().iter().copied()).collect();
        self.gpu.bind()?;
        let pair = self.inputs.filled(&words)?;
        let operands = arguments::SegmentAttention {
            qkv: qkv.at(),
            tiles: pair.device.at(),
            heads: shape.heads as u32,
            head_dim: shape.head_dim as u32,
            scale: (shape.head_dim as f32).sqrt().recip(),
            out: out.at(),
        };
        let grid = Grid { blocks: (tiles.len(), shape.heads), threads: 2 * queries as u32, shared_bytes: 0 };
        self.kernels.launch(kernel, grid, operands)?;
        self.inputs.release(pair)
    }

    fn gather_convolution(
        &mut self,
        grid: PixelGrid,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let rows = grid.halved().pixels();
        if grid.pixels() != x.live {
            return Err(DeviceError::Misuse(format!("{} rows for the pixels of {grid:?}", x.live)));
        }
        out.written(rows, x.width * WINDOW)?;
        let operands = arguments::GatherConvolution {
            x: x.at(),
            height: grid.height as u32,
            width: grid.width as u32,
            channels: x.width as u32,
            out: out.at(),
        };
        self.kernels.launch(kernel::gather_convolution, Grid::of(rows, THREADS), operands)
    }

    fn join_rows(&mut self, x: &Tensor, out: &mut Tensor) -> Result<(), DeviceError> {
        let (from, to, elements) = (x.width, out.width, x.elements());
        if to == 0 || !to.is_multiple_of(from.max(1)) {
            return Err(DeviceError::Misuse(format!("rows of {from} joined to rows of {to}")));
        }
        if !elements.is_multiple_of(to) {
            return Err(DeviceError::Misuse(format!("{elements} values for rows of {to}")));
        }
        out.written(elements / to, to)?;
        out.data.copy_from(0, &x.data, 0, elements * size_of::<f32>())
    }

    fn add_rows(&mut self, out: &mut Tensor, first: usize, values: &[f32]) -> Result<(), DeviceError> {
        let room = out.live.saturating_sub(first).saturating_mul(out.width);
        if out.width == 0 || values.len() > room || !values.len().is_multiple_of(out.width) {
            let (count, live, width) = (values.len(), out.live, out.width);
            return Err(DeviceError::Misuse(format!(
                "{count} values from row {first} on for {live} rows of {width}"
            )));
        }
        self.gpu.bind()?;
        let mut to = out.at().add(first * out.width);
        if values.len() <= ADDED_AT_ONCE {
            let pair = self.inputs.filled(&bits(values))?;
            self.add_values(pair.device.at(), values.len(), to)?;
            return self.inputs.release(pair);
        }
        // The positions of a large picture. The memory for them stays small.
        let bytes = ADDED_AT_ONCE * size_of::<f32>();
        grown(&mut self.scratch.added, &self.gpu, bytes, "values that are added to rows")?;
        for values in values.chunks(ADDED_AT_ONCE) {
            let Some(added) = &self.scratch.added else { continue };
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            self.loader.load(added, 0, [&bytes[..]].into_iter())?;
            self.add_values(added.at(), values.len(), to)?;
            to = to.add(values.len());
        }
        Ok(())
    }
}

impl CudaDevice {
    /// Enqueues `out += x` for `count` elements.
    fn add_values(
        &self,
        x: DevicePointer<f32>,
        count: usize,
        out: DevicePointer<f32>,
    ) -> Result<(), DeviceError> {
        let operands = arguments::Add { x, count: count as u64, out };
        self.kernels.launch(kernel::add, Grid::over(count, THREADS), operands)
    }
}

/// Returns the width of all heads of q. Refuses an attention without heads.
fn check(shape: EncoderHeads) -> Result<usize, DeviceError> {
    match shape.heads.checked_mul(shape.head_dim) {
        Some(width) if width > 0 => Ok(width),
        _ => Err(DeviceError::Misuse(format!("attention of {shape:?}"))),
    }
}

/// Returns the kernel for heads of this size, and the number of queries of its tiles.
fn tiled(shape: EncoderHeads) -> Result<(Kernel<arguments::SegmentAttention>, usize), DeviceError> {
    match shape.head_dim {
        0..=32 => Ok((kernel::segment_attention_32, 64)),
        33..=64 => Ok((kernel::segment_attention_64, 64)),
        65..=80 => Ok((kernel::segment_attention_80, 64)),
        81..=128 => Ok((kernel::segment_attention_128, 16)),
        elements => Err(DeviceError::Unsupported(format!(
            "attention of an encoder with heads of {elements} elements, the limit is 128"
        ))),
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
