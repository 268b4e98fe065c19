//! Conversion between forward passes and plan messages.

use tutti_kernels::{PageId, RowInputs, SlotId, StepInputs};
use tutti_proto::cluster::v1 as pb;

use crate::EmbeddedRows;

/// Encodes the inputs of a forward pass as a message.
pub(super) fn forward(inputs: &StepInputs<'_>, embeddings: &[EmbeddedRows<'_>]) -> pb::ForwardPlan {
    let embedded = |rows: &EmbeddedRows<'_>| pb::EmbeddedRows {
        first_token: rows.first_token as u32,
        values: rows.values.to_vec(),
    };
    let row = |row: &RowInputs<'_>| pb::ForwardRow {
        first_token: row.first_token as u32,
        tokens: row.tokens as u32,
        start: row.start as u32,
        block_table: row.block_table.iter().map(|page| page.0).collect(),
    };
    pb::ForwardPlan {
        token_ids: inputs.token_ids.to_vec(),
        positions: inputs.positions[0].to_vec(),
        rows: inputs.rows.iter().map(row).collect(),
        logit_rows: inputs.logit_rows.iter().map(|&row| row as u32).collect(),
        embeddings: embeddings.iter().map(embedded).collect(),
    }
}

/// The inputs of a forward pass, decoded from a message into the form that a model takes.
pub(super) struct Forward {
    plan: pb::ForwardPlan,
    /// The rows' block tables, end to end.
    pages: Vec<PageId>,
    logit_rows: Vec<usize>,
}

impl Forward {
    pub fn new(plan: pb::ForwardPlan) -> Self {
        let pages = plan.rows.iter().flat_map(|row| &row.block_table).map(|&page| PageId(page)).collect();
        let logit_rows = plan.logit_rows.iter().map(|&row| row as usize).collect();
        Self { plan, pages, logit_rows }
    }

    pub fn run<T>(&self, run: impl FnOnce(&StepInputs<'_>, &[EmbeddedRows<'_>]) -> T) -> T {
        let mut first_page = 0;
        let row = |row: &pb::ForwardRow| {
            let block_table = &self.pages[first_page..first_page + row.block_table.len()];
            first_page += row.block_table.len();
            let (first_token, tokens, start) = (row.first_token, row.tokens, row.start);
            RowInputs {
                first_token: first_token as usize,
                tokens: tokens as usize,
                start: start as usize,
                slot: SlotId::NULL,
                continues: false,
                block_table,
            }
        };
        let rows: Vec<_> = self.plan.rows.iter().map(row).collect();
        let embeddings = self.plan.embeddings.iter();
        let embeddings: Vec<_> = embeddings
            .map(|rows| EmbeddedRows { first_token: rows.first_token as usize, values: &rows.values })
            .collect();
        let inputs = StepInputs {
            token_ids: &self.plan.token_ids,
            positions: [&self.plan.positions[..]; 3],
            rows: &rows,
            copies: &[],
            logit_rows: &self.logit_rows,
        };
        run(&inputs, &embeddings)
    }
}

#[cfg(test)]
mod tests;
