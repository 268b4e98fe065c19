//! The rows of a running request, from plan to commit or abort.

use tutti_planes::SlotId;
use tutti_proto::declaration::WalkId;

use super::{Progress, Running};
use crate::{
    holding::PlanePool,
    step::{Row, RowCopies, Terminality},
    ticket::Ticket,
};

impl Running {
    /// The request's next `tokens` positions as a row, which is not in a step yet.
    #[inline]
    pub fn next_row(&self, ticket: Ticket, walk: WalkId, tokens: usize) -> Row {
        let Progress { computed, generated, epoch } = self.planned;
        let positions = computed..computed + tokens;
        let request = &self.request;
        // `positions.end` is compared with the end of the prefill, not of the prompt: replayed output is part of the
        // prefill.
        let terminality = if positions.end >= self.prefill_end && request.wants_output(generated) {
            Terminality::Terminal { forbidden: request.stopping.forbidden(generated) }
        } else {
            Terminality::NotTerminal
        };
        Row {
            key: request.key,
            walk,
            epoch,
            positions,
            terminality,
            block_table: self.holding.table.pages(),
            slot: self.holding.slot,
            continues: false,
            ticket,
        }
    }

    /// The request's next row, if that row is a decode. The row is made on the assumption that the rows in flight
    /// succeed and do not end the request. None if the next row is not a decode, if the request lacks a page for the
    /// row, or if no more output is wanted.
    pub fn next_decode(&self, ticket: Ticket, page_tokens: usize) -> Option<Row> {
        let Progress { computed, generated, .. } = self.planned;
        let prefilled = computed >= self.prefill_end;
        let has_room = computed < self.holding.table.len() * page_tokens;
        let walk = self.request.decode.filter(|_| prefilled && has_room)?;
        self.request.wants_output(generated).then(|| self.next_row(ticket, walk, 1))
    }

    /// True if `row`, which `next_decode` made, is the request's next row: the rows in flight succeeded and did not end
    /// the request.
    #[inline]
    pub fn is_next(&self, row: &Row) -> bool {
        // The row is the next one if its position and epoch are those of the request's next row. Both can be compared
        // only while the request still holds the row's block table.
        let Progress { computed, epoch, .. } = self.planned;
        row.positions.start == computed && row.epoch == epoch && self.holding.table.is(&row.block_table)
    }

    /// Decides the copies of the request's slot at the head of the step that gets the request's next row. `row` is the
    /// index of that row in the step. None if the step does not copy the request's slot.
    pub fn slot_copies(&mut self, row: usize, pool: &mut PlanePool) -> Option<RowCopies> {
        let initial = self.initial.take();
        // The device runs the save after the row that ends at the rung, even if that row is in flight. The request's
        // first row begins at a snapshot, so it saves none.
        let at_rung =
            self.ladder(pool.pages().page_tokens()).is_some_and(|ladder| ladder.has(self.planned.computed));
        let saves = initial.is_none() && at_rung && !self.has_snapshot(pool);
        let save = if saves { pool.take_slot() } else { None };
        (initial.is_some() || save.is_some()).then_some(RowCopies { row, initial, save })
    }

    /// Puts the request's next row into a step. The request's progress does not change until the step is committed.
    #[inline]
    pub fn enter_step(&mut self, row: &mut Row) {
        let (start, planned) = (row.positions.start, &mut self.planned);
        // The token at the row's first position is output, and the row that samples it is in flight.
        row.continues = planned.generated > self.request.generated && start >= self.prefill_end;
        planned.computed = row.positions.end;
        planned.generated += u32::from(row.is_terminal());
        planned.epoch = row.epoch.next();
        self.in_flight += 1;
    }

    /// Takes the request's last row in flight out of its step, which has not run.
    pub fn leave_step(&mut self, row: &Row, copies: Option<RowCopies>, pool: &mut PlanePool) {
        if let Some(RowCopies { initial, save, .. }) = copies {
            self.initial = initial;
            save.iter().for_each(|&slot| pool.give_back_slot(slot));
        }
        // The commit of a late row has taken back the row that continues it, too.
        if self.planned.computed == row.positions.end {
            self.planned.computed = row.positions.start;
            self.planned.generated -= u32::from(row.is_terminal());
            self.planned.epoch = row.epoch;
        }
        self.in_flight -= 1;
    }

    /// True if the block before the next row is recorded and has a snapshot.
    fn has_snapshot(&self, pool: &PlanePool) -> bool {
        let recorded = self.recorded * pool.pages().page_tokens() == self.planned.computed;
        recorded && self.chain.is_some_and(|chain| pool.snapshot(chain) != SlotId::NULL)
    }
}
