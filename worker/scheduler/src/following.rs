//! Requests that wait for a prefill that another request is computing, so that an equal start is computed once.
//!
//! Choices of one prompt arrive together, before any of their pages is in the prefix cache. The first one that is
//! admitted leads, and the others follow: they hold nothing until the leader has computed the blocks that they share,
//! and then find these in the prefix cache. A follower delays no other request. A leader is always earlier in order
//! than its followers and gets its part of every step, so a follower waits for as long as one prefill takes.

use crate::{
    holding::PlanePool,
    launch::GraphRole,
    request::{Cut, Request, Running},
    snapshots::Ladder,
    ticket::Ticket,
};

/// The relation of a waiting request to the request that computes its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Following {
    /// No leader is known.
    #[default]
    Nobody,
    /// The request waits until the leader has computed the positions before `until`, and then begins behind `blocks`.
    Leader { leader: Ticket, until: usize, blocks: usize },
    /// The request has waited for blocks that are not cached after all, as there was no room for them. It follows no
    /// other leader, so that such requests do not run one after another.
    InVain,
}

impl Request {
    /// True if the request computes its prefill here and may begin behind cached blocks.
    fn may_follow(&self) -> bool {
        let computes = matches!(self.role, GraphRole::Whole | GraphRole::Prefill);
        computes
            && self.first_block.is_some()
            && self.content.as_ref().is_some_and(|content| content.may_reuse)
    }

    /// Finds, among running requests that are earlier in order, the one that is about to compute most of this request's
    /// blocks that are not cached yet.
    pub fn find_leader<'a>(
        &self,
        earlier: impl Iterator<Item = (&'a Ticket, &'a Running)>,
        pool: &PlanePool,
    ) -> Option<Following> {
        if !self.may_follow() {
            return None;
        }
        let leaders =
            earlier.filter(|(_, leader)| leader.first_block() == self.first_block && leader.leads());
        let shared =
            leaders.filter_map(|(&ticket, leader)| Some((self.blocks_from(leader, pool)?, ticket, leader)));
        // The first of equal leaders is the farthest.
        let (blocks, leader, running) =
            shared.max_by_key(|&(blocks, ticket, _)| (blocks, std::cmp::Reverse(ticket)))?;
        let page_tokens = pool.pages().page_tokens();
        // The leader's row that begins at a rung saves the slot. So a snapshot exists once this row is committed.
        let until = blocks * page_tokens + usize::from(pool.has_slots());
        let gains = running.computed() < until && blocks > self.blocks_to_skip(pool);
        gains.then_some(Following::Leader { leader, until, blocks })
    }

    /// Number of leading blocks behind which this request can begin once the leader has computed them.
    fn blocks_from(&self, leader: &Running, pool: &PlanePool) -> Option<usize> {
        let page_tokens = pool.pages().page_tokens();
        // This request computes its last prefill position itself, because its first token is sampled from it. So the
        // block of that position cannot come from the leader.
        let most = ((self.prefill_end() - 1) / page_tokens).min(leader.prefill_end() / page_tokens);
        let (ours, theirs) = (self.content.as_ref()?, leader.content()?);
        let differs = |&index: &usize| ours.block(index, page_tokens) != theirs.block(index, page_tokens);
        let blocks = (0..most).find(differs).unwrap_or(most);
        let blocks = match pool.has_slots() {
            true => Ladder::new(leader.prefill_end(), page_tokens).up_to(blocks),
            false => blocks,
        };
        Some(self.blocks_to_resume_behind(blocks, page_tokens))
    }
}

impl Running {
    /// True if others may wait for this request's prefill: the request computes it here and without pause, and can
    /// record it.
    pub fn leads(&self) -> bool {
        // A slot is saved at the rungs of a prefill only if the prefill may be cut there.
        let leaves =
            !self.leaves_snapshots() || self.prefill().iter().all(|segment| segment.cut == Cut::Anywhere);
        let advances = !self.held_back && !self.is_victim && !self.awaits_planes();
        leaves && advances && self.can_record() && self.computed() < self.prefill_end()
    }
}
