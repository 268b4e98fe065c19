//! Hyper-connections.

use super::CpuDevice;
use crate::cpu::hyper::{self, Projection};
use crate::cpu::memory::{Tensor, Vector};
use crate::{DeviceError, HyperConnections, HyperShape, StreamProjection};

impl HyperConnections for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn spread(&mut self, x: &Tensor, shape: HyperShape, out: &mut Tensor) -> Result<(), DeviceError> {
        check(&shape)?;
        let out = out.written(x.live(), shape.stream_elements())?;
        hyper::spread(&mut self.pool, x.read(shape.width)?, shape, out)
    }

    fn mix_streams(
        &mut self,
        streams: &Tensor,
        projection: StreamProjection<'_, Vector>,
        shape: HyperShape,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        check(&shape)?;
        let projection = read(projection, shape, shape.mix_elements(), 3)?;
        let x = streams.read(shape.stream_elements())?;
        let out = out.written(streams.live(), shape.mix_elements())?;
        hyper::mix(self.path, &mut self.pool, x, projection, shape, out)
    }

    fn collapse_streams(
        &mut self,
        streams: &Tensor,
        mixes: &Tensor,
        shape: HyperShape,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        check(&shape)?;
        let x = streams.read(shape.stream_elements())?;
        let mixes = rows_of(mixes, streams.live(), shape.mix_elements())?;
        let out = out.written(streams.live(), shape.width)?;
        hyper::collapse(self.path, &mut self.pool, x, (mixes, shape.mix_elements()), shape, out)
    }

    fn combine_streams(
        &mut self,
        y: &Tensor,
        mixes: &Tensor,
        shape: HyperShape,
        streams: &mut Tensor,
    ) -> Result<(), DeviceError> {
        check(&shape)?;
        let mixes = rows_of(mixes, y.live(), shape.mix_elements())?;
        let streams = streams.change(y.live(), shape.stream_elements())?;
        hyper::combine(self.path, &mut self.pool, y.read(shape.width)?, mixes, shape, streams)
    }

    fn head_streams(
        &mut self,
        streams: &Tensor,
        projection: StreamProjection<'_, Vector>,
        shape: HyperShape,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        check(&shape)?;
        let projection = read(projection, shape, shape.streams, 1)?;
        let x = streams.read(shape.stream_elements())?;
        let out = out.written(streams.live(), shape.width)?;
        hyper::head(self.path, &mut self.pool, x, projection, shape, out)
    }
}

/// Returns an error unless there are streams, not more than the kernels hold, and iterations.
fn check(shape: &HyperShape) -> Result<(), DeviceError> {
    let HyperShape { streams, width, iterations, .. } = *shape;
    let limit = HyperShape::MAX_STREAMS;
    if streams > limit {
        return Err(DeviceError::Unsupported(format!("{streams} streams, the limit is {limit}")));
    }
    if [streams, width, iterations].contains(&0) || width.checked_mul(streams * limit * 4).is_none() {
        return Err(DeviceError::Misuse(format!("hyper-connections of {shape:?}")));
    }
    Ok(())
}

/// Returns the values of a tensor; an error unless it has `rows` rows of `width` elements.
fn rows_of(x: &Tensor, rows: usize, width: usize) -> Result<&[f32], DeviceError> {
    match x.live() {
        live if live == rows => x.read(width),
        live => Err(DeviceError::Misuse(format!("{live} rows of mixes for {rows} rows"))),
    }
}

/// Returns the weights of a projection; an error unless they are those of `outputs` outputs in `parts` parts.
fn read<'a>(
    projection: StreamProjection<'a, Vector>,
    shape: HyperShape,
    outputs: usize,
    parts: usize,
) -> Result<Projection<'a>, DeviceError> {
    let StreamProjection { weight, scale, base } = projection;
    Ok(Projection {
        weight: weight.read(outputs * shape.stream_elements())?,
        scale: scale.read(parts)?,
        base: base.read(outputs)?,
    })
}
