//! Operations over all ranks of a TP group.

use super::CpuDevice;
use crate::cpu::memory::Tensor;
use crate::cpu::rowwise;
use crate::{Collectives, Device, DeviceError, collective::CollectiveError};

impl Collectives for CpuDevice {
    const IMPLEMENTED: bool = true;

    fn all_reduce(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        let Some(group) = &mut self.group else { return Ok(()) };
        Ok(group.all_reduce(x.values_mut())?)
    }

    fn all_reduce_add(&mut self, x: &mut Tensor, out: &mut Tensor) -> Result<(), DeviceError> {
        // The operands are checked before this rank joins the collective.
        out.change(x.live(), x.width())?;
        self.all_reduce(x)?;
        rowwise::add(&mut self.pool, x.values(), x.width(), out.change(x.live(), x.width())?)
    }

    fn all_reduce_max(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        let Some(group) = &mut self.group else { return Ok(()) };
        let own: Vec<u8> = x.values().iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut all = Vec::new();
        group.all_gather(&own, &mut all)?;
        for part in all.chunks(own.len().max(1)) {
            for (value, bytes) in x.values_mut().iter_mut().zip(part.as_chunks().0) {
                let other = f32::from_le_bytes(*bytes);
                *value = if value.is_nan() || other.is_nan() { f32::NAN } else { value.max(other) };
            }
        }
        Ok(())
    }

    fn gather_rows(
        &mut self,
        part: &Tensor,
        rows: &[usize],
        out: Option<&mut Tensor>,
    ) -> Result<(), DeviceError> {
        let width = part.width();
        if let Some(row) = rows.iter().find(|row| **row >= part.live()) {
            return Err(DeviceError::Misuse(format!("row {row} gathered of {}", part.live())));
        }
        let mut packed = Vec::with_capacity(rows.len() * width);
        rows.iter().for_each(|row| packed.extend_from_slice(&part.values()[row * width..][..width]));
        self.gather(&packed, (part.live(), width), |index| rows[index], out)
    }

    fn gather_columns(&mut self, part: &Tensor, out: Option<&mut Tensor>) -> Result<(), DeviceError> {
        self.gather(part.values(), (part.live(), part.width()), |row| row, out)
    }
}

impl CpuDevice {
    /// Gathers rows of `width` columns at rank 0. Row `i` of `part` goes to row `row_at(i)` of `out`, which has `live`
    /// rows.
    fn gather(
        &mut self,
        part: &[f32],
        (live, width): (usize, usize),
        row_at: impl Fn(usize) -> usize,
        out: Option<&mut Tensor>,
    ) -> Result<(), DeviceError> {
        let group_rank = self.group_rank();
        let mut to = out.map(|out| out.written(live, group_rank.world_size * width)).transpose()?;
        if to.is_some() != group_rank.is_leader() {
            return Err(CollectiveError::Misuse("columns are gathered at rank 0 alone".to_owned()).into());
        }
        let Self { group, gathered, .. } = self;
        let gathered = match group {
            Some(group) => {
                gathered.resize(to.as_ref().map_or(0, |_| group_rank.world_size * part.len()), 0.0);
                group.gather(part, to.is_some().then_some(&mut gathered[..]))?;
                &gathered[..]
            }
            None => part,
        };
        let Some(to) = &mut to else { return Ok(()) };
        for (rank, part) in gathered.chunks(part.len().max(1)).enumerate() {
            for (index, part) in part.chunks(width).enumerate() {
                to[(row_at(index) * group_rank.world_size + rank) * width..][..width].copy_from_slice(part);
            }
        }
        Ok(())
    }
}
