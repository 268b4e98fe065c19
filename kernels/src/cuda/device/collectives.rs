//! Operations over all ranks of a TP group: NCCL's collectives in the device's stream, and the kernels around them.

use super::CudaDevice;
use crate::collective::CollectiveError;
use crate::cuda::arguments::{Keys, LaySideBySide, PackRows};
use crate::cuda::kernels::Grid;
use crate::cuda::memory::{DevicePointer, grown};
use crate::cuda::nccl::Reduction;
use crate::cuda::sources::kernel;
use crate::cuda::tensor::Tensor;
use crate::{Collectives, Device, DeviceError};

/// Threads per block of all kernels here.
const THREADS: u32 = 256;

impl Collectives for CudaDevice {
    const IMPLEMENTED: bool = true;

    fn all_reduce(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        let Some(group) = &mut self.group else { return Ok(()) };
        match x.elements() {
            0 => Ok(()),
            elements => group.all_reduce(x.at(), elements, Reduction::Sum),
        }
    }

    fn all_reduce_add(&mut self, x: &mut Tensor, out: &mut Tensor) -> Result<(), DeviceError> {
        // The operands are checked before this rank joins the collective.
        out.check(x.live, x.width)?;
        self.all_reduce(x)?;
        self.add(x, out)
    }

    fn all_reduce_max(&mut self, x: &mut Tensor) -> Result<(), DeviceError> {
        let (Some(group), elements) = (&mut self.group, x.elements()) else { return Ok(()) };
        if elements == 0 {
            return Ok(());
        }
        let (grid, operands) = (Grid::over(elements, THREADS), Keys { x: x.at(), count: elements as u64 });
        self.kernels.launch(kernel::to_keys, grid, operands)?;
        group.all_reduce(x.at(), elements, Reduction::LargestKey)?;
        self.kernels.launch(kernel::from_keys, grid, operands)
    }

    fn gather_rows(
        &mut self,
        part: &Tensor,
        rows: &[usize],
        out: Option<&mut Tensor>,
    ) -> Result<(), DeviceError> {
        if let Some(row) = rows.iter().find(|row| **row >= part.live) {
            return Err(DeviceError::Misuse(format!("row {row} gathered of {}", part.live)));
        }
        self.gather(part, Some(rows), out)
    }

    fn gather_columns(&mut self, part: &Tensor, out: Option<&mut Tensor>) -> Result<(), DeviceError> {
        self.gather(part, None, out)
    }
}

impl CudaDevice {
    /// Gathers the ranks' columns at rank 0, for the given rows of `part` or for all live rows.
    fn gather(
        &mut self,
        part: &Tensor,
        rows: Option<&[usize]>,
        out: Option<&mut Tensor>,
    ) -> Result<(), DeviceError> {
        let group_rank = self.group_rank();
        if out.is_some() != group_rank.is_leader() {
            return Err(CollectiveError::Misuse("columns are gathered at rank 0 alone".to_owned()).into());
        }
        let (ranks, width) = (group_rank.world_size, part.width);
        let out = out.map(|out| out.written_like(part, ranks * width).map(|()| out)).transpose()?;
        let count = rows.map_or(part.live, <[usize]>::len);
        let elements = count * width;
        if elements == 0 {
            return Ok(());
        }
        let Self { inputs, scratch, gpu, kernels, group, .. } = self;
        // The scratch memory has room for the maximum number of rows of `part`, so that it does not grow later.
        let bytes = part.capacity * width * size_of::<f32>();
        let (own, list) = match rows {
            None => (&part.data, DevicePointer::NULL),
            Some(rows) => {
                let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
                let (list, packed) =
                    (inputs.upload(&rows)?, grown(&mut scratch.packed, gpu, bytes, "rows to gather")?);
                let (x, out) = (part.at(), packed.at());
                let operands = PackRows { x, rows: list, count: elements as u64, width: width as u32, out };
                kernels.launch(kernel::pack_rows, Grid::over(elements, THREADS), operands)?;
                (packed, list)
            }
        };
        let parts = match (group, &out) {
            (None, _) => own,
            (Some(group), None) => return group.gather(own.at(), None, elements),
            (Some(group), Some(_)) => {
                let all = grown(&mut scratch.gathered, gpu, ranks * bytes, "the ranks' parts of a gather")?;
                all.copy_from(0, own, 0, elements * size_of::<f32>())?;
                group.gather(own.at(), Some(all.at()), elements)?;
                all
            }
        };
        let Some(out) = out else { return Ok(()) };
        let total = ranks * elements;
        let operands = LaySideBySide {
            parts: parts.at(),
            rows: list,
            ranks: ranks as u32,
            row_count: count as u32,
            width: width as u32,
            count: total as u64,
            out: out.at(),
        };
        kernels.launch(kernel::lay_side_by_side, Grid::over(total, THREADS), operands)
    }
}
