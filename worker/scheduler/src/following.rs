//! Requests that wait while another request computes a prefill with an equal start, so that the start is computed once.
//!
//! The choices of one prompt arrive together, before any of their pages is in the prefix cache. The first choice that
//! is admitted becomes the *leader*, and the other choices *follow* it. A follower holds no pages and no slot until the
//! leader has computed the shared blocks. The follower then finds these blocks in the prefix cache. A follower delays
//! no other request. A leader is always earlier in order than its followers and gets its part of every step, so a
//! follower waits no longer than one prefill takes.

use crate::{
    holding::PlanePool,
    launch::GraphRole,
    request::{Cut, Request, Running},
    snapshots::Ladder,
    ticket::Ticket,
};

/// A waiting request's relation to the running request that computes its first blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Following {
    /// No leader is known.
    #[default]
    Nobody,
    /// The request waits until the leader has computed all positions before `until`. The request then begins behind its
    /// first `blocks` blocks.
    Leader { leader: Ticket, until: usize, blocks: usize },
    /// The leader has computed the shared blocks, but the prefix cache had no room to keep them. The request follows no
    /// other leader. Otherwise such requests would run one after another.
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

    /// Finds the running request to follow: among the requests earlier in order, the one that shares the most leading
    /// blocks with this request. None if following gains no block that is not cached already.
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
        // If several leaders share the same number of blocks, the first in order has advanced furthest.
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
        // This request computes its last prefill position itself, because its first token is sampled from that
        // position. So the block of that position cannot come from the leader.
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
    /// True if other requests may wait for this request's prefill. The prefill must be unfinished, be computed here
    /// without a pause, and be recorded in the prefix cache.
    pub fn leads(&self) -> bool {
        // The slot is saved only where the prefill is cut. So a request that leaves snapshots leads only if its prefill
        // may be cut anywhere.
        let leaves =
            !self.leaves_snapshots() || self.prefill().iter().all(|segment| segment.cut == Cut::Anywhere);
        let advances = !self.held_back && !self.is_victim && !self.awaits_planes() && !self.awaits_mask();
        leaves && advances && self.can_record() && self.computed() < self.prefill_end()
    }
}
