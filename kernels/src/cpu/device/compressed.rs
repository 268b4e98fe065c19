//! Windows and compressed entries.

use super::CpuDevice;
use crate::cpu::compressed::{
    self, Compressor, EntrySource, IndexerOperands, Operands, Ring, Tails, TailsNorm, WindowKeys,
};
use crate::cpu::memory::format::{Bf16, F16, F32};
use crate::cpu::memory::planes::no_entries;
use crate::cpu::memory::{Planes, Tensor, Vector};
use crate::{
    AttendedEntries, Compress, Compressed, CompressorShape, DeviceError, Indexer, IndexerShape, Norm, Rotary,
    RotateTails, StoreWindow, TailNorm, WeightType, WindowAttention, WindowShape,
};

impl Compressed for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn compress(&mut self, operands: Compress<'_, Tensor, Vector, Planes>) -> Result<(), DeviceError> {
        let Compress { projected, shape, offsets, norm, rope, planes, entries, states, layer } = operands;
        self.check_rows(projected)?;
        let Planes { entries: pools, slots, .. } = planes;
        let count = pools.len();
        let pool = pools.get_mut(entries).ok_or_else(|| no_entries(entries, count))?;
        let CompressorShape { ratio, width, parts } = shape;
        pool.check(layer, width)?;
        if ratio != pool.shape.ratio || !(1..=2).contains(&parts) {
            return Err(DeviceError::Misuse(format!("{shape:?} over a pool of {:?}", pool.shape)));
        }
        if 2 * rope.inverse.len() > width {
            let rotated = 2 * rope.inverse.len();
            return Err(DeviceError::Misuse(format!("angles for {rotated} elements of entries of {width}")));
        }
        self.step.check_pages(pool.shape.page_tokens, pool.shape.pages)?;
        let Norm { weight, eps } = norm;
        let [states] = slots.states([(states, layer, shape.state_bytes())])?;
        let compressor = Compressor {
            projected: projected.read(shape.projected())?,
            shape,
            offsets: offsets.read(ratio * parts * width)?,
            norm: (weight.read(width)?, eps),
            rope,
            states,
        };
        let Self { path, pool: threads, step, compressed: scratch, .. } = self;
        compressed::compress(*path, threads, step, scratch, &compressor, (pool, layer))
    }

    fn rotate_tails(&mut self, tails: RotateTails<'_, Tensor, Vector>) -> Result<(), DeviceError> {
        let RotateTails { x, head_dim, norm, rotary: Rotary { angles }, inverse } = tails;
        let rows = self.check_rows(angles)?;
        let (width, rotated) = (x.width(), angles.width());
        let fits = head_dim > 0 && width > 0 && width.is_multiple_of(head_dim);
        if !fits || rotated > head_dim || !rotated.is_multiple_of(2) {
            return Err(DeviceError::Misuse(format!(
                "angles for {rotated} elements of heads of {head_dim} in rows of {width}"
            )));
        }
        let norm = match norm {
            TailNorm::None => TailsNorm::None,
            TailNorm::Unweighted { eps } => TailsNorm::Unweighted(eps),
            TailNorm::Weighted(Norm { weight, eps }) => TailsNorm::Weighted(weight.read(head_dim)?, eps),
        };
        let x = self.step.pad(x.change(rows, width)?, width);
        let (heads, angles) = (width / head_dim, angles.values());
        let tails = Tails { x, heads, head_dim, norm, angles, rotated, inverse };
        compressed::rotate_tails(self.path, &mut self.pool, tails)
    }

    fn window_attention(
        &mut self,
        attention: WindowAttention<'_, Tensor, Vector, Planes>,
        out: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let WindowAttention { q, kv, shape, sinks, planes, window, layer, compressed } = attention;
        let rows = self.check_rows(q)?;
        self.check_rows(kv)?;
        check_window(&shape)?;
        let WindowShape { heads, head_dim, .. } = shape;
        let width = q.width();
        if heads.checked_mul(head_dim) != Some(width) {
            return Err(DeviceError::Misuse(format!("queries of {width} elements for {shape:?}")));
        }
        let window = WindowKeys {
            ring: Ring::new(&planes.slots, &shape, window, layer)?,
            kv: kv.read(head_dim)?,
            head_dim,
            window: shape.window,
        };
        let (q, sinks) = (q.read(width)?, sinks.read(heads)?);
        let entries = compressed.map(|attended| self.entry_source(attended, head_dim, planes)).transpose()?;
        let out = self.step.pad(out.written(rows, width)?, width);
        let operands = Operands { q, shape, sinks, window, entries, out };
        let Self { path, pool, step, compressed: scratch, .. } = self;
        compressed::window_attention(*path, pool, step, scratch, operands)
    }

    fn store_window(&mut self, operands: StoreWindow<'_, Tensor, Planes>) -> Result<(), DeviceError> {
        let StoreWindow { kv, shape, planes, window: plane, layer } = operands;
        self.check_rows(kv)?;
        check_window(&shape)?;
        let WindowShape { head_dim, window, dtype, .. } = shape;
        let (of, sizes, kv) = ([(plane, layer, shape.ring_bytes())], (head_dim, window), kv.read(head_dim)?);
        let (pool, rows) = (&mut self.pool, &self.step.rows[..]);
        match dtype {
            WeightType::F32 => {
                let [rings] = planes.slots.states_of(of)?;
                compressed::store_window::<F32>(pool, rows, kv, sizes, &rings)
            }
            WeightType::F16 => {
                let [rings] = planes.slots.states_of(of)?;
                compressed::store_window::<F16>(pool, rows, kv, sizes, &rings)
            }
            WeightType::Bf16 => {
                let [rings] = planes.slots.states_of(of)?;
                compressed::store_window::<Bf16>(pool, rows, kv, sizes, &rings)
            }
        }
    }
}

impl CpuDevice {
    /// Checks the entries that a layer with heads of `head_dim` attends to, and the operands of their choice.
    fn entry_source<'a>(
        &mut self,
        attended: AttendedEntries<'a, Tensor>,
        head_dim: usize,
        planes: &'a Planes,
    ) -> Result<EntrySource<'a>, DeviceError> {
        let AttendedEntries { entries, layer, indexer } = attended;
        let pool = planes.entries(entries)?;
        pool.check(layer, head_dim)?;
        self.step.check_pages(pool.shape.page_tokens, pool.shape.pages)?;
        let indexer = indexer.map(|Indexer { queries, weights, shape, entries }| {
            self.check_rows(queries)?;
            self.check_rows(weights)?;
            let IndexerShape { heads, head_dim, top_k } = shape;
            let keys = planes.entries(entries)?;
            keys.check(layer, head_dim)?;
            let fits = heads.checked_mul(head_dim) == Some(queries.width()) && heads > 0 && top_k > 0;
            if !fits || keys.shape.ratio != pool.shape.ratio {
                let (width, keys, pool) = (queries.width(), &keys.shape, &pool.shape);
                return Err(DeviceError::Misuse(format!(
                    "{shape:?} with queries of {width} elements and keys of {keys:?} for entries of {pool:?}"
                )));
            }
            let (queries, weights) = (queries.values(), weights.read(heads)?);
            Ok(IndexerOperands { queries, weights, shape, pool: keys })
        });
        Ok(EntrySource { pool, layer, indexer: indexer.transpose()? })
    }
}

/// Returns an error unless all sizes of a window's heads are positive, and the bytes of a ring are a number.
fn check_window(shape: &WindowShape) -> Result<(), DeviceError> {
    let WindowShape { heads, head_dim, window, dtype, .. } = *shape;
    let bytes = window.checked_mul(head_dim).and_then(|elements| elements.checked_mul(dtype.bytes()));
    if [heads, head_dim, window].contains(&0) || bytes.is_none() {
        return Err(DeviceError::Misuse(format!("a window of {shape:?}")));
    }
    Ok(())
}
