//! A bound on an amount that requests hold together, such as choices or tokens. No request and no key takes all of it.
//!
//! - A request with more than an eighth of the bound is large. Large requests together hold at most three quarters, so
//!   a quarter stays for the others. A request that alone has more counts as three quarters and runs beside that
//!   reserve.
//! - A key that holds something gets more only while it then holds at most three times what is left free. So a key
//!   alone takes three quarters, and any number of keys leave room for one more (dynamic thresholds, Choudhury and
//!   Hahne, 1998). Callers without a key have no such limit.

use std::collections::HashMap;

use crate::keys::Share;

/// A request above this fraction of a bound is large.
const LARGE_FRACTION: u64 = 8;
/// The fraction of a bound that large requests leave to others.
const RESERVED_FRACTION: u64 = 4;
/// A key holds at most this many times what it leaves free.
const THRESHOLD: u64 = 3;

/// The amounts that are held. The limit is an argument of the methods, because it may change.
#[derive(Debug, Default)]
pub struct Bound {
    held: u64,
    large: u64,
    by_key: HashMap<Share, u64>,
}

/// An amount that a request holds, to be given back with [`Bound::leave`].
#[derive(Debug)]
#[must_use = "a dropped amount stays held"]
pub struct Held {
    share: Share,
    /// The amount as far as it counts.
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

/// The part of a bound that large requests may hold.
fn for_large(limit: u64) -> u64 {
    limit - limit / RESERVED_FRACTION
}

impl Bound {
    /// The amount that is held, as far as it counts.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Holds an amount; `None`, without effect, if there is no room for it.
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

    /// Replaces a held amount by another one, for which there need not be room.
    pub fn replace(&mut self, limit: u64, held: Held, amount: u64) -> Held {
        let share = held.share;
        self.leave(held);
        let held = Held::new(limit, share, amount);
        self.add(&held);
        held
    }

    fn add(&mut self, held: &Held) {
        self.held += held.amount;
        self.large += if held.is_large { held.amount } else { 0 };
        if held.share.is_of_key() {
            *self.by_key.entry(held.share).or_default() += held.amount;
        }
    }

    /// Gives an amount back.
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
