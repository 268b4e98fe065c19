//! Wrong keys by the address that sends them. An address that guesses is soon refused before its key is looked at.
//!
//! Callers behind one proxy share an address. So that a guesser there does not lock out the others, an address that has
//! lately shown a right key is never refused.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::bucket::Bucket;

/// Time for which a right key protects its address.
const PROTECTED: Duration = Duration::from_secs(600);
/// Time in which an address that tries nothing has all its tries again.
const REFILLED: Duration = Duration::from_secs(60);
/// Most addresses that are remembered. At the limit, those of which nothing is worth knowing are forgotten. If there
/// are none, further addresses are not limited.
const MAX_ADDRESSES: usize = 16_384;

/// The addresses that have shown keys of late.
#[derive(Debug, Default)]
pub struct WrongKeys(Mutex<HashMap<IpAddr, Tries>>);

/// The record of one address.
#[derive(Debug)]
struct Tries {
    left: Bucket,
    wrong: Option<Instant>,
    right: Option<Instant>,
}

impl Tries {
    fn is_protected(&self, now: Instant) -> bool {
        self.right.is_some_and(|right| now.saturating_duration_since(right) < PROTECTED)
    }

    fn is_worth_knowing(&self, now: Instant) -> bool {
        let is_counted = self.wrong.is_some_and(|wrong| now.saturating_duration_since(wrong) < REFILLED);
        is_counted || self.is_protected(now)
    }
}

impl WrongKeys {
    /// Returns the time after which an address may try again, if it has tried too often.
    pub fn refuse(&self, address: IpAddr, per_minute: u32, now: Instant) -> Option<Duration> {
        let addresses = self.0.lock();
        let tries = addresses.get(&address)?;
        // A copy of the bucket is asked: only a wrong key uses up a try.
        let mut left = tries.left;
        if tries.is_protected(now) { None } else { left.take_one(per_minute, now).err() }
    }

    /// Notes that an address has shown a wrong key.
    pub fn wrong(&self, address: IpAddr, per_minute: u32, now: Instant) {
        self.note(address, now, |tries| {
            tries.left.charge(1, per_minute, now);
            tries.wrong = Some(now);
        });
    }

    /// Notes that an address has shown a right key.
    pub fn right(&self, address: IpAddr, now: Instant) {
        self.note(address, now, |tries| tries.right = Some(now));
    }

    fn note(&self, address: IpAddr, now: Instant, change: impl FnOnce(&mut Tries)) {
        let mut addresses = self.0.lock();
        if addresses.len() >= MAX_ADDRESSES && !addresses.contains_key(&address) {
            addresses.retain(|_, tries| tries.is_worth_knowing(now));
            if addresses.len() >= MAX_ADDRESSES {
                return;
            }
        }
        let fresh = || Tries { left: Bucket::full(now), wrong: None, right: None };
        change(addresses.entry(address).or_insert_with(fresh));
    }
}

#[cfg(test)]
mod tests;
