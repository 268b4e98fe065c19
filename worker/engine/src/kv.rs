//! Size of a worker's planes: pages and slots, out of one budget of bytes.
//!
//! `kv_cache_memory` sets the budget. Without it, the budget is what remains of the worker's share of its machine:
//!
//! - A conductor divides the memory that was free when it started by the number of workers that it starts, and tells
//!   each worker this share. A worker that joins by hand takes all free memory as its share.
//! - Seven eighths of the share, less the bytes of weights, of the largest step and of embeddings of media, are for
//!   planes. The rest of the share is left to the system, to the conductor and to cached files.
//! - The planes take no more than the maximum number of running requests can use, each with the longest context, and no
//!   more than seven eighths of the memory that is free now.
//!
//! On a device with memory of its own, planes take at most fifteen sixteenths of its free memory. This memory is
//! measured after the weights are loaded and the largest step has run ([`profile`](crate::profile())). The worker's
//! share of the host's memory does not count.
//!
//! The conductor measures free memory once, before it starts any worker. A worker's own measurement would not count the
//! memory that other workers still need while they load.

use tutti_models::Model;
use tutti_runtime::{Error, memory};

use crate::EngineSettings;

/// Budget of the planes in bytes if no setting gives one, and neither share nor free memory is known.
pub const DEFAULT_KV_BYTES: u64 = 2 << 30;

/// A worker takes at most this many eighths of its memory for weights, steps and planes together.
const USED_EIGHTHS: u64 = 7;

/// On a device with memory of its own, the free memory divided by this number is not used for planes. The driver
/// allocates memory, too, and free memory may be fragmented.
const DEVICE_MARGIN_DIVISOR: u64 = 16;

/// The free memory divided by this number, up to [`DEFAULT_KV_BYTES`], is for planes even if the worker's share leaves
/// less. A share leaves too little if several workers map one file of weights: the file is in memory once, but counts
/// for each of them.
const LEAST_DIVISOR: u64 = 8;

/// Slots of running requests take at most the budget divided by this number, unless `max_running_requests` asks for
/// more.
const RUNNING_DIVISOR: u64 = 2;

/// Snapshots of the prefix cache take at most this part of the budget: the bytes that the slots of running requests
/// leave, divided by this number.
const SNAPSHOT_DIVISOR: u64 = 4;

/// Tokens per page of a model without paged planes, whose pages take no memory.
const PAGE_TOKENS: u32 = 16;

/// Size of a worker's planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSize {
    /// Pages per plane, the null page included.
    pub pages: usize,
    /// Slots per plane: the null slot, one per running request, and the slots for snapshots.
    pub slots: usize,
    /// Maximum number of running requests.
    pub running: usize,
    /// Tokens per page.
    pub page_tokens: usize,
    /// Bytes per page, over all paged planes.
    pub page_bytes: usize,
    /// Bytes per slot, over all slot planes.
    pub slot_bytes: usize,
}

impl KvSize {
    /// Largest number of tokens that all requests together can hold.
    pub fn tokens(&self) -> usize {
        self.pages.saturating_sub(1) * self.page_tokens
    }

    /// Bytes of all pages and slots.
    pub fn bytes(&self) -> u64 {
        self.pages as u64 * self.page_bytes as u64 + self.slots as u64 * self.slot_bytes as u64
    }

    /// Divides the budget of [`kv_budget`] between pages and slots. If `max_running_requests` is not set, slots limit
    /// the running requests. Fails if the budget holds less than two pages and the slots of all running requests.
    pub fn choose(model: &dyn Model, settings: &EngineSettings) -> Result<Self, Error> {
        let sizes = Sizes::of(model, settings);
        if !model.has_thinker() {
            // An encoder has no planes, but a scheduler requires at least two pages.
            let Sizes { page_tokens, running, .. } = sizes;
            return Ok(Self {
                pages: 2,
                slots: running,
                running: running - 1,
                page_tokens,
                page_bytes: 0,
                slot_bytes: 0,
            });
        }
        if model.declaration().page_tokens().is_some() && sizes.page_bytes == 0 {
            return Err(Error::internal("the model's pages are empty"));
        }
        sizes.divide(kv_budget(model, settings, None), settings)
    }
}

/// Returns the number of bytes that a worker may take for planes. `share` is the number of bytes that the conductor
/// allots to the worker, weights included.
///
/// The ranks of a TP group may get different numbers. They then agree on the minimum.
pub fn kv_budget(model: &dyn Model, settings: &EngineSettings, share: Option<u64>) -> u64 {
    if let Some(size) = settings.kv_cache_memory {
        return size.0;
    }
    let enough = Sizes::of(model, settings).enough();
    if let Some(free) = model.free_bytes() {
        // The memory of weights and of the largest step is in use already, so it is not part of the free memory.
        return enough.min(free - free / DEVICE_MARGIN_DIVISOR);
    }
    let taken = [model.weight_bytes(), model.step_bytes(), embedding_bytes(model, settings)];
    let taken = taken.into_iter().fold(0, u64::saturating_add);
    enough.min(default_bytes(share, taken, memory::available()))
}

/// Returns the bytes of host memory that embeddings of media may take.
fn embedding_bytes(model: &dyn Model, settings: &EngineSettings) -> u64 {
    if model.declaration().media().is_empty() {
        return 0;
    }
    settings.embedding_memory.0.saturating_add(settings.encoder_cache_memory.0)
}

/// Returns the bytes of the smallest planes that serve requests: two pages, and the slots that the settings ask for.
pub fn least_bytes(page_bytes: u64, slot_bytes: u64, settings: &EngineSettings) -> u64 {
    let running = settings.max_running_requests.map_or(1, |limit| limit.min(settings.max_step_tokens));
    let slots = slot_bytes.saturating_mul(1 + running as u64);
    page_bytes.saturating_mul(2).saturating_add(slots)
}

/// Returns the bytes for planes out of a worker's `share` of the machine. Weights and the largest step take `taken`
/// bytes of the share. `available` bytes of the machine are free now.
fn default_bytes(share: Option<u64>, taken: u64, available: Option<u64>) -> u64 {
    let part = |bytes: u64| bytes / 8 * USED_EIGHTHS;
    let left = share.map(|share| part(share).saturating_sub(taken));
    let Some(most) = left.into_iter().chain(available.map(part)).min() else { return DEFAULT_KV_BYTES };
    let least = available.map_or(0, |available| available / LEAST_DIVISOR).min(DEFAULT_KV_BYTES);
    most.max(least)
}

/// The sizes of one page and one slot, and the maximum numbers of both that requests can use.
struct Sizes {
    page_tokens: usize,
    page_bytes: usize,
    slot_bytes: usize,
    /// Number of slots: the null slot, and one per running request.
    running: usize,
    /// Number of pages: the null page, and the pages of the maximum number of running requests, each with the longest
    /// context.
    most_pages: u64,
}

impl Sizes {
    fn of(model: &dyn Model, settings: &EngineSettings) -> Self {
        let declaration = model.declaration();
        let page_tokens = declaration.page_tokens().unwrap_or(PAGE_TOKENS).max(1) as usize;
        let running = settings.running_limit().min(settings.max_step_tokens);
        let pages = model.limits().max_context_tokens.div_ceil(page_tokens);
        Self {
            page_tokens,
            page_bytes: model.page_bytes(),
            slot_bytes: usize::try_from(declaration.slot_bytes()).unwrap_or(usize::MAX),
            running: 1 + running,
            most_pages: (pages.saturating_mul(settings.running_limit()) as u64).saturating_add(1),
        }
    }

    /// Bytes of all pages and slots that requests can use. One snapshot per page is included, but at most as many bytes
    /// as the pages' bytes divided by [`SNAPSHOT_DIVISOR`].
    fn enough(&self) -> u64 {
        let pages = self.most_pages.saturating_mul(self.page_bytes as u64);
        let running = (self.running as u64).saturating_mul(self.slot_bytes as u64);
        let snapshots = self.most_pages.saturating_mul(self.slot_bytes as u64).min(pages / SNAPSHOT_DIVISOR);
        pages.saturating_add(running).saturating_add(snapshots)
    }

    /// Returns the largest number of slots, the null slot included, that fit into `budget / divisor` and leave the
    /// bytes of two pages in the budget. At least 2, even if two slots do not fit.
    fn fitting(&self, budget: u64, divisor: u64) -> usize {
        let (page, slot) = (self.page_bytes as u64, self.slot_bytes as u64);
        let room = budget.saturating_sub(page.saturating_mul(2)).min(budget / divisor);
        let slots = room.checked_div(slot).unwrap_or(u64::MAX);
        usize::try_from(slots).unwrap_or(usize::MAX).max(2)
    }

    fn divide(&self, budget: u64, settings: &EngineSettings) -> Result<KvSize, Error> {
        let Self { page_tokens, page_bytes, slot_bytes, most_pages, .. } = *self;
        let (page, slot) = (page_bytes as u64, slot_bytes as u64);
        let running = match settings.max_running_requests {
            Some(_) => self.running,
            None => self.running.min(self.fitting(budget, RUNNING_DIVISOR)),
        };
        let for_slots = slot.saturating_mul(running as u64);
        let rest = budget.saturating_sub(for_slots);
        if budget < for_slots || rest < 2 * page {
            let most = self.fitting(budget, 1) - 1;
            let two_pages_and_slots = slot.saturating_mul(1 + most as u64).saturating_add(2 * page);
            if let Some(asked) = settings.max_running_requests
                && slot > 0
                && two_pages_and_slots <= budget
            {
                let message = format!(
                    "is {asked}, the limit is {most}: kv_cache_memory, {budget} bytes, holds {} slots of {slot} bytes, \
                     one of them null, besides two pages of {page} bytes",
                    1 + most
                );
                return Err(Error::invalid("max_running_requests", message));
            }
            let pages = rest.checked_div(page).unwrap_or(0);
            let slots = match slot {
                0 => String::new(),
                slot => format!(" besides {running} slots of {slot} bytes, one per running request"),
            };
            let message = format!(
                "{budget} bytes are {pages} pages of {page} bytes{slots}, but at least 2 are needed: the null page \
                 and one for requests"
            );
            return Err(Error::invalid("kv_cache_memory", message));
        }
        let snapshots = match slot {
            _ if settings.no_prefix_cache => 0,
            0 => 0,
            // A snapshot belongs to the end of a page, so there are no more snapshots than pages.
            slot => (rest / SNAPSHOT_DIVISOR / slot).min(most_pages),
        };
        let for_pages = rest - snapshots * slot;
        // Page ids are 32 bits wide. If pages take no bytes, there are as many pages as requests can use.
        let pages = for_pages.checked_div(page).unwrap_or(most_pages).clamp(2, u64::from(u32::MAX));
        let slots = running.saturating_add(snapshots.min(pages) as usize);
        Ok(KvSize { pages: pages as usize, slots, running: running - 1, page_tokens, page_bytes, slot_bytes })
    }
}

#[cfg(test)]
mod tests;
