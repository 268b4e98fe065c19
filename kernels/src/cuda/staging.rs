//! Pairs of pinned and device memory, for the small inputs and the results of steps.
//!
//! A pair is reused once the stream has passed its last use. After the first steps nothing is allocated any more.

use std::collections::VecDeque;
use std::sync::Arc;

use super::context::{Event, Gpu};
use super::memory::{DeviceBuffer, DevicePointer, PinnedBuffer, in_step};
use crate::DeviceError;

/// Smallest size of a pair in bytes.
const SMALLEST: usize = 4 << 10;

/// A pinned buffer and a device buffer of the same size.
pub(super) struct Pair {
    pub(super) host: PinnedBuffer,
    pub(super) device: DeviceBuffer,
}

impl Pair {
    /// Enqueues a copy of the first `bytes` bytes to the host.
    pub(super) fn fetch(&mut self, bytes: usize) -> Result<(), DeviceError> {
        self.device.copy_out(0, bytes, &mut self.host, 0)
    }
}

/// Free pairs, and pairs that the stream may still use.
pub(super) struct Staging {
    gpu: Arc<Gpu>,
    free: Vec<Pair>,
    /// Pairs that have been used since the last [`seal`](Self::seal).
    open: Vec<Pair>,
    /// Pairs that become free once the stream has reached the event.
    sealed: VecDeque<(Event, Vec<Pair>)>,
    bytes: u64,
}

impl Staging {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: gpu.clone(), free: Vec::new(), open: Vec::new(), sealed: VecDeque::new(), bytes: 0 }
    }

    /// Total size in bytes of the device memory of all pairs.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Enqueues a copy of `words` to the device, and returns the address of the copy. The copy is valid until the
    /// stream has passed the next [`seal`](Self::seal).
    pub(super) fn upload(&mut self, words: &[u32]) -> Result<DevicePointer<u32>, DeviceError> {
        let pair = self.filled(words)?;
        let at = pair.device.at();
        self.keep(pair);
        Ok(at)
    }

    /// Returns a pair whose device memory gets `words`.
    pub(super) fn filled(&mut self, words: &[u32]) -> Result<Pair, DeviceError> {
        let bytes = size_of_val(words);
        let mut pair = self.take(bytes)?;
        for (to, word) in pair.host.bytes_mut().chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        pair.device.copy_in(0, &pair.host, bytes)?;
        Ok(pair)
    }

    /// Takes back a pair that operations enqueued so far use. It is free once the stream has passed them. In contrast
    /// to [`keep`](Self::keep), this also works outside of steps, where nothing seals.
    pub(super) fn release(&mut self, pair: Pair) -> Result<(), DeviceError> {
        self.sealed.push_back((Event::record(&self.gpu)?, vec![pair]));
        Ok(())
    }

    /// Keeps a pair until the stream has passed the next [`seal`](Self::seal).
    pub(super) fn keep(&mut self, pair: Pair) {
        self.open.push(pair);
    }

    /// Records an event. Once the stream has reached the event, the pairs used so far are free.
    pub(super) fn seal(&mut self) -> Result<(), DeviceError> {
        if !self.open.is_empty() {
            self.sealed.push_back((Event::record(&self.gpu)?, std::mem::take(&mut self.open)));
        }
        Ok(())
    }

    /// Returns the smallest free pair of at least `bytes` bytes, or allocates one.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Pair, DeviceError> {
        while let Some((event, _)) = self.sealed.front() {
            match event.is_reached() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return Err(self.gpu.lost("waiting for a step's inputs", error)),
            }
            if let Some((_, pairs)) = self.sealed.pop_front() {
                self.free.extend(pairs);
            }
        }
        let fits = self.free.iter().enumerate().filter(|(_, pair)| pair.device.bytes() >= bytes);
        if let Some((index, _)) = fits.min_by_key(|(_, pair)| pair.device.bytes()) {
            return Ok(self.free.swap_remove(index));
        }
        let bytes = bytes.max(SMALLEST).next_power_of_two();
        let host = PinnedBuffer::new(&self.gpu, bytes).map_err(in_step)?;
        let device = DeviceBuffer::new(&self.gpu, bytes, "staging of inputs and results").map_err(in_step)?;
        self.bytes += bytes as u64;
        Ok(Pair { host, device })
    }

    /// Takes back a pair that the stream no longer uses.
    pub(super) fn give(&mut self, pair: Pair) {
        self.free.push(pair);
    }
}
