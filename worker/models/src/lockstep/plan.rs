//! Conversion between forward passes and plan messages.

use tutti_kernels::{PageId, RowInputs, SlotCopy, SlotId, StepInputs, StepShape};
use tutti_proto::cluster::v1 as pb;

use super::tables::Tables;
use crate::EmbeddedRows;

/// Encodes the inputs of a forward pass in `plan`, whose memory is reused. `tables` is the leader's copy of the other
/// ranks' block tables, and is updated in the same way as the plan updates the tables themselves.
///
/// If the inputs cannot be encoded, returns the reason. All tables are then unchanged, and the plan must not be sent.
pub(super) fn encode(
    inputs: &StepInputs<'_>,
    embeddings: &[EmbeddedRows<'_>],
    tables: &mut Tables,
    plan: &mut pb::ForwardPlan,
) -> Result<(), String> {
    check(inputs, tables)?;
    clear(plan);
    plan.token_ids.extend_from_slice(inputs.token_ids);
    let [first, others @ ..] = inputs.positions;
    plan.positions.extend_from_slice(first);
    if others.iter().any(|axis| *axis != first) {
        others.iter().for_each(|axis| plan.positions.extend_from_slice(axis));
    }
    for (index, row) in inputs.rows.iter().enumerate() {
        let kept = tables.replace(row.slot, row.block_table);
        let appended = &row.block_table[kept..];
        plan.row_tokens.push(row.tokens as u32);
        plan.row_starts.push(row.start as u32);
        plan.row_slots.push(row.slot.0);
        plan.row_pages_kept.push(kept as u32);
        plan.row_pages.push(appended.len() as u32);
        plan.pages.extend(appended.iter().map(|page| page.0));
        if row.continues {
            plan.continued_rows.push(index as u32);
        }
    }
    plan.copies.extend(inputs.copies.iter().map(|copy| pb::SlotCopy { from: copy.from.0, to: copy.to.0 }));
    plan.logit_rows.extend(inputs.logit_rows.iter().map(|&row| row as u32));
    plan.shape = inputs.shape.map(|StepShape { tokens, logit_rows }| pb::StepShape {
        tokens: tokens as u32,
        logit_rows: logit_rows as u32,
    });
    plan.embeddings.extend(embeddings.iter().map(|rows| pb::EmbeddedRows {
        first_token: rows.first_token as u32,
        width: rows.width as u32,
        values: rows.values.to_vec(),
    }));
    Ok(())
}

fn check(inputs: &StepInputs<'_>, tables: &mut Tables) -> Result<(), String> {
    let (tokens, mut next) = (inputs.token_ids.len(), 0);
    if let Some(axis) = inputs.positions.iter().find(|axis| axis.len() != tokens) {
        return Err(format!("{} positions for {tokens} tokens", axis.len()));
    }
    tables.begin_step();
    for (index, row) in inputs.rows.iter().enumerate() {
        if row.first_token != next {
            let first = row.first_token;
            return Err(format!("row {index} begins at token {first}, after a row that ends at {next}"));
        }
        next += row.tokens;
        tables.check_row(row.slot, row.block_table.len())?;
    }
    if next != tokens {
        return Err(format!("rows cover {next} of {tokens} tokens"));
    }
    check_copies(inputs.copies, tables)
}

fn check_copies(copies: &[SlotCopy], tables: &Tables) -> Result<(), String> {
    copies.iter().flat_map(|copy| [copy.from, copy.to]).try_for_each(|slot| tables.check_slot(slot).map(drop))
}

fn clear(plan: &mut pb::ForwardPlan) {
    let pb::ForwardPlan {
        token_ids,
        positions,
        row_tokens,
        row_starts,
        row_slots,
        row_pages_kept,
        row_pages,
        pages,
        continued_rows,
        copies,
        logit_rows,
        embeddings,
        shape,
    } = plan;
    for list in
        [token_ids, row_tokens, row_starts, row_slots, row_pages_kept, row_pages, pages, continued_rows]
    {
        list.clear();
    }
    positions.clear();
    copies.clear();
    logit_rows.clear();
    embeddings.clear();
    *shape = None;
}

/// Decodes a plan, updates `tables`, and calls `run` with the inputs that the leader has encoded.
///
/// An error says what is wrong with the message. After an error, `tables` may differ from the leader's tables.
pub(super) fn decode<T>(
    plan: &pb::ForwardPlan,
    tables: &mut Tables,
    run: impl FnOnce(&StepInputs<'_>, &[EmbeddedRows<'_>]) -> T,
) -> Result<T, String> {
    let pages: Vec<PageId> = plan.pages.iter().copied().map(PageId).collect();
    let shares = apply(plan, &pages, tables)?;
    let (mut first_token, mut continued) = (0, plan.continued_rows.iter().peekable());
    let mut rows = Vec::with_capacity(shares.len());
    for (index, appended) in shares.iter().enumerate() {
        let (tokens, slot) = (plan.row_tokens[index] as usize, SlotId(plan.row_slots[index]));
        rows.push(RowInputs {
            first_token,
            tokens,
            start: plan.row_starts[index] as usize,
            slot,
            continues: continued.next_if(|row| **row as usize == index).is_some(),
            block_table: if slot == SlotId::NULL { appended } else { tables.of(slot) },
        });
        first_token += tokens;
    }
    let tokens = plan.token_ids.len();
    if first_token != tokens {
        return Err(format!("rows cover {first_token} of {tokens} tokens"));
    }
    if let Some(row) = continued.next() {
        return Err(format!("row {row} continues, but is out of order"));
    }
    let positions = match plan.positions.len() {
        one if one == tokens => [&plan.positions[..]; 3],
        three if three == 3 * tokens => {
            let axis = |index: usize| &plan.positions[index * tokens..(index + 1) * tokens];
            [axis(0), axis(1), axis(2)]
        }
        other => return Err(format!("{other} positions for {tokens} tokens")),
    };
    let copy = |copy: &pb::SlotCopy| SlotCopy { from: SlotId(copy.from), to: SlotId(copy.to) };
    let copies: Vec<SlotCopy> = plan.copies.iter().map(copy).collect();
    check_copies(&copies, tables)?;
    let logit_rows: Vec<usize> = plan.logit_rows.iter().map(|&row| row as usize).collect();
    let embeddings: Vec<_> = plan
        .embeddings
        .iter()
        .map(|rows| EmbeddedRows {
            first_token: rows.first_token as usize,
            width: rows.width as usize,
            values: &rows.values,
        })
        .collect();
    let shape = plan.shape.map(|pb::StepShape { tokens, logit_rows }| StepShape {
        tokens: tokens as usize,
        logit_rows: logit_rows as usize,
    });
    let (token_ids, rows, copies, logit_rows) =
        (&plan.token_ids[..], &rows[..], &copies[..], &logit_rows[..]);
    Ok(run(&StepInputs { token_ids, positions, rows, copies, logit_rows, shape }, &embeddings))
}

/// Checks the lists with one entry per row, and applies them to the tables. Returns each row's part of `pages`.
fn apply<'a>(
    plan: &pb::ForwardPlan,
    pages: &'a [PageId],
    tables: &mut Tables,
) -> Result<Vec<&'a [PageId]>, String> {
    let count = plan.row_tokens.len();
    for (name, list) in [
        ("starts", &plan.row_starts),
        ("slots", &plan.row_slots),
        ("kept pages", &plan.row_pages_kept),
        ("pages", &plan.row_pages),
    ] {
        if list.len() != count {
            return Err(format!("{} {name} for {count} rows", list.len()));
        }
    }
    tables.begin_step();
    let (mut shares, mut rest) = (Vec::with_capacity(count), pages);
    for index in 0..count {
        let (slot, kept) = (SlotId(plan.row_slots[index]), plan.row_pages_kept[index] as usize);
        let appended = plan.row_pages[index] as usize;
        let Some((share, after)) = rest.split_at_checked(appended) else {
            return Err(format!("row {index} has {appended} new pages, but {} are left", rest.len()));
        };
        tables.check_row(slot, kept.saturating_add(appended))?;
        tables.append(slot, kept, share)?;
        shares.push(share);
        rest = after;
    }
    match rest.len() {
        0 => Ok(shares),
        left => Err(format!("{left} pages of no row")),
    }
}

#[cfg(test)]
mod tests;
