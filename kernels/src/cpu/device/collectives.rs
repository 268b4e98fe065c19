//! Operations over all ranks of a TP group.

use super::CpuDevice;
use crate::cpu::memory::Tensor;
use crate::cpu::rowwise;
use crate::{Collectives, Device, DeviceError, collective::CollectiveError};

impl Collectives for CpuDevice {
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

    fn gather_columns(&mut self, part: &Tensor, out: Option<&mut Tensor>) -> Result<(), DeviceError> {
        let (group_rank, width) = (self.group_rank(), part.width());
        let mut to = out.map(|out| out.written(part.live(), group_rank.world_size * width)).transpose()?;
        if to.is_some() != group_rank.is_leader() {
            return Err(CollectiveError::Misuse("columns are gathered at rank 0 alone".to_owned()).into());
        }
        let Some(group) = &mut self.group else {
            to.into_iter().for_each(|to| to.copy_from_slice(part.values()));
            return Ok(());
        };
        self.gathered.resize(to.as_ref().map_or(0, |to| to.len()), 0.0);
        group.gather(part.values(), to.is_some().then_some(&mut self.gathered[..]))?;
        let Some(to) = &mut to else { return Ok(()) };
        for (rank, part) in self.gathered.chunks(part.values().len().max(1)).enumerate() {
            for (row, part) in part.chunks(width).enumerate() {
                to[(row * group_rank.world_size + rank) * width..][..width].copy_from_slice(part);
            }
        }
        Ok(())
    }
}
