//! The memory of all matchers together.

use std::{
    io,
    sync::{
        atomic::{AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

use tutti_constraints::Matcher;

/// Counts the bytes of all matchers, and refuses the growth of the largest ones at a limit.
///
/// A grammar can make a matcher visit as many states as it likes. Beyond the limit, a matcher fails if it grows to more
/// than an equal part of the limit, so a small one goes on. All together take less than twice the limit.
///
/// A large matcher takes long to free. The last owner of a matcher is often the device's thread, so a thread of its own
/// frees matchers. It ends with this value.
#[derive(Debug)]
pub(super) struct MatcherMemory {
    limit: usize,
    bytes: AtomicUsize,
    matchers: AtomicUsize,
    freed: mpsc::Sender<Matcher>,
}

impl MatcherMemory {
    /// Starts the thread that frees matchers.
    pub fn start(limit: usize) -> io::Result<Self> {
        let (freed, matchers) = mpsc::channel();
        thread::Builder::new()
            .name("mask-frees".into())
            .spawn(move || matchers.into_iter().for_each(drop))?;
        Ok(Self { limit, bytes: AtomicUsize::new(0), matchers: AtomicUsize::new(0), freed })
    }

    /// Adds a matcher of 0 bytes.
    pub fn enter(&self) {
        self.matchers.fetch_add(1, Relaxed);
    }

    /// Changes the size of a matcher. The reason if the matcher must fail.
    pub fn change(&self, before: usize, bytes: usize) -> Result<(), String> {
        // The difference may be negative; the sum wraps around to the right one.
        let all = self
            .bytes
            .fetch_add(bytes.wrapping_sub(before), Relaxed)
            .wrapping_add(bytes.wrapping_sub(before));
        let (limit, part) = (self.limit, self.limit / self.matchers.load(Relaxed).max(1));
        match bytes > before && all > limit && bytes > part {
            true => {
                Err(format!("its states take {bytes} bytes of {all} of all requests; the limit is {limit}"))
            }
            false => Ok(()),
        }
    }

    /// Removes a matcher of this size, and frees it.
    pub fn leave(&self, bytes: usize, matcher: Option<Matcher>) {
        self.bytes.fetch_sub(bytes, Relaxed);
        self.matchers.fetch_sub(1, Relaxed);
        // If the thread has ended, the matcher is freed here.
        matcher.into_iter().for_each(|matcher| drop(self.freed.send(matcher)));
    }
}

#[cfg(test)]
mod tests;
