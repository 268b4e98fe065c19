//! A limit on the total amount that all requests hold, such as choices or tokens. No single request and no single API
//! key can hold the whole limit.
//!
//! - A request for more than an eighth of the limit is large. All large requests together hold at most three quarters
//!   of the limit, so a quarter stays for small requests. A request for more than three quarters counts as exactly
//!   three quarters.
//! - A key that already holds an amount gets more only if its new total is at most three times the amount that stays
//!   free. So a single key can hold three quarters, and some room stays for one more key (dynamic thresholds, Choudhury
//!   and Hahne, 1998). Callers without a key have no such limit.

use std::collections::HashMap;

use crate::keys::Share;

/// A request for more than `1 / LARGE_FRACTION` of the limit is large.
const LARGE_FRACTION: u64 = 8;
/// Large requests leave `1 / RESERVED_FRACTION` of the limit to small requests.
const RESERVED_FRACTION: u64 = 4;
/// A key holds at most this many times the amount that stays free.
const THRESHOLD: u64 = 3;

/// The amounts that requests hold now. The methods take the limit as an argument, because the limit may change at run
/// time.
#[derive(Debug, Default)]
pub struct Bound {
    held: u64,
    large: u64,
    by_key: HashMap<Share, u64>,
}

/// An amount that a request holds until it is passed to [`Bound::leave`].
#[derive(Debug)]
#[must_use = "a dropped amount stays held"]
pub struct Held {
    share: Share,
    /// The counted amount: at most three quarters of the limit.
    amount: u64,
    is_large: bool,
}

impl Held {
    fn new(limit: u64, share: Share, amount: u64) -> Self {
        Self {
            share,
            amount: amount.min(for_large(limit)),
            is_large: amount > (limit / LARGE_FRACTION).max(1),
        }
    }
}

/// The part of the limit that large requests together may hold.
pub fn for_large(limit: u64) -> u64 {
    limit - limit / RESERVED_FRACTION
}

impl Bound {
    /// The sum of all counted amounts.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Holds an amount. Returns `None` and changes nothing if there is no room for it.
    pub fn enter(&mut self, limit: u64, share: Share, amount: u64) -> Option<Held> {
        let held = Held::new(limit, share, amount);
        let free = limit.checked_sub(self.held + held.amount)?;
        if held.is_large && self.large + held.amount > for_large(limit) {
            return None;
        }
        let own = self.by_key.get(&share).copied().unwrap_or(0);
        if own > 0 && own + held.amount > THRESHOLD.saturating_mul(free) {
            return None;
        }
        self.add(&held);
        Some(held)
    }

    /// Replaces a held amount by another amount, without a check for room.
    pub fn replace(&mut self, limit: u64, held: Held, amount: u64) -> Held {
        let share = held.share;
        self.leave(held);
        let held = Held::new(limit, share, amount);
        self.add(&held);
        held
    }

    /// Holds another amount in place of one. If there is no room for it, `Err` is the amount held before.
    pub fn change(&mut self, limit: u64, held: Held, amount: u64) -> Result<Held, Held> {
        let (share, before) = (held.share, Held { ..held });
        self.leave(held);
        match self.enter(limit, share, amount) {
            Some(held) => Ok(held),
            None => {
                self.add(&before);
                Err(before)
            }
        }
    }

    fn add(&mut self, held: &Held) {
        self.held += held.amount;
        self.large += if held.is_large { held.amount } else { 0 };
        if held.share.is_of_key() {
            *self.by_key.entry(held.share).or_default() += held.amount;
        }
    }

    /// Releases an amount.
    pub fn leave(&mut self, held: Held) {
        self.held -= held.amount;
        self.large -= if held.is_large { held.amount } else { 0 };
        if let Some(own) = self.by_key.get_mut(&held.share) {
            *own -= held.amount;
            if *own == 0 {
                self.by_key.remove(&held.share);
            }
        }
    }
}

#[cfg(test)]
mod tests;
