//! Counts wrong keys per client address. After too many wrong keys, requests of an address are refused before their key
//! is looked up.
//!
//! Callers behind one proxy share an address. One of them must not lock out the others, so an address that has recently
//! sent a right key is never refused.

use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::bucket::Bucket;

/// Time for which a right key protects its address.
const PROTECTED: Duration = Duration::from_secs(600);
/// Time without a wrong key after which an address has all its tries again.
const REFILLED: Duration = Duration::from_secs(60);
/// Maximum number of addresses that are remembered. At the limit, addresses without a recent wrong or right key are
/// removed. If there are none, further addresses are not limited.
const MAX_ADDRESSES: usize = 16_384;

/// The addresses that have recently sent keys.
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
        // Tests a copy of the bucket, because only a wrong key uses up a try.
        let mut left = tries.left;
        if tries.is_protected(now) { None } else { left.take_one(per_minute, now).err() }
    }

    /// Records that an address has sent a wrong key.
    pub fn wrong(&self, address: IpAddr, per_minute: u32, now: Instant) {
        self.note(address, now, |tries| {
            tries.left.charge(1, per_minute, now);
            tries.wrong = Some(now);
        });
    }

    /// Records that an address has sent a right key.
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
