//! Rows and steps for tests.

use tutti_kernels::{Device, DeviceError, PageId, RowInputs, SlotCopy, SlotId, StepInputs};

/// One row of a step. By default it has the null slot.
#[derive(Clone, Debug, Default)]
pub struct Share {
    pub tokens: usize,
    pub start: usize,
    pub pages: Vec<PageId>,
    pub slot: u32,
    pub continues: bool,
}

/// Begins a step with these rows. If `ids` is empty, all ids are zero.
pub fn begin<D: Device>(
    device: &mut D,
    planes: &mut D::Planes,
    shares: &[Share],
    ids: &[u32],
    logit_rows: &[usize],
    copies: &[SlotCopy],
) -> Result<(), DeviceError> {
    let (mut rows, mut positions) = (Vec::new(), Vec::new());
    for share in shares {
        let (first_token, tokens, start) = (positions.len(), share.tokens, share.start);
        let (slot, continues) = (SlotId(share.slot), share.continues);
        rows.push(RowInputs { first_token, tokens, start, slot, continues, block_table: &share.pages });
        positions.extend((start..start + tokens).map(|position| position as f32));
    }
    let zeros = vec![0; positions.len()];
    let token_ids = if ids.is_empty() { &zeros } else { ids };
    let positions = [&positions[..]; 3];
    let shape = None;
    device.begin_step(&StepInputs { token_ids, positions, rows: &rows, copies, logit_rows, shape }, planes)
}
