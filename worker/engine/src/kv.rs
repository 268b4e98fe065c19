//! Size of a worker's KV pool.

use std::fs;

use tutti_models::{Limits, Model};
use tutti_runtime::Error;

use crate::EngineSettings;

/// Largest size of a KV pool in bytes, unless `kv_cache_memory` sets another size.
pub const DEFAULT_KV_BYTES: u64 = 2 << 30;

/// Unless `kv_cache_memory` is set, a pool takes at most the available memory divided by this number. The rest is left
/// to other workers, because a worker does not know how many others start on its machine.
const DEFAULT_SHARE_DIVISOR: u64 = 8;

/// Size of a pool: the number of its pages, the null page included, and the size of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvSize {
    pub pages: usize,
    pub page_tokens: usize,
    pub page_bytes: usize,
}

impl KvSize {
    /// Largest number of tokens that all requests together can hold.
    pub fn tokens(&self) -> usize {
        self.pages.saturating_sub(1) * self.page_tokens
    }

    pub fn bytes(&self) -> u64 {
        self.pages as u64 * self.page_bytes as u64
    }

    /// Chooses the pool's size from the settings and this machine's memory.
    pub fn choose(model: &dyn Model, settings: &EngineSettings) -> Result<Self, Error> {
        let declaration = model.declaration();
        let Some(page_tokens) = declaration.page_tokens().filter(|_| !declaration.has_slots()) else {
            return Err(Error::internal("this engine runs only models whose planes are all paged"));
        };
        let (page_tokens, page_bytes) = (page_tokens as usize, model.page_bytes());
        if !model.has_thinker() {
            // An encoder has no pages, but a scheduler requires at least two.
            return Ok(Self { pages: 2, page_tokens, page_bytes: 0 });
        }
        if page_bytes == 0 {
            return Err(Error::internal("the model's pages are empty"));
        }
        let budget = match settings.kv_cache_memory {
            Some(size) => size.0,
            None => default_bytes(page_tokens, page_bytes, model.limits(), settings, available_memory()),
        };
        // Page ids are 32 bits wide.
        let pages = (budget / page_bytes as u64).min(u64::from(u32::MAX)) as usize;
        if pages < 2 {
            let message = format!(
                "{budget} bytes are {pages} pages of {page_bytes} bytes, but at least 2 are needed: \
                 the null page and one for requests"
            );
            return Err(Error::invalid("kv_cache_memory", message));
        }
        Ok(Self { pages, page_tokens, page_bytes })
    }
}

/// Number of KV pages, the null page included, that the settings and this machine's memory allow. The ranks of a TP
/// group may get different numbers and then agree on the minimum.
pub fn kv_pages(model: &dyn Model, settings: &EngineSettings) -> Result<usize, Error> {
    Ok(KvSize::choose(model, settings)?.pages)
}

fn default_bytes(
    page_tokens: usize,
    page_bytes: usize,
    limits: &Limits,
    settings: &EngineSettings,
    available: Option<u64>,
) -> u64 {
    let pages = limits.max_context_tokens.div_ceil(page_tokens).saturating_mul(settings.max_running_requests);
    let enough = (pages as u64).saturating_add(1).saturating_mul(page_bytes as u64);
    let share = available.map_or(u64::MAX, |bytes| bytes / DEFAULT_SHARE_DIVISOR);
    enough.min(DEFAULT_KV_BYTES).min(share)
}

/// Bytes of memory that this process can still allocate: the minimum of the bytes left on the machine and the bytes
/// left in the control group.
fn available_memory() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let group = || {
        let number = |name: &str| fs::read_to_string(name).ok()?.trim().parse::<u64>().ok();
        let limit = number("/sys/fs/cgroup/memory.max")?;
        Some(limit.saturating_sub(number("/sys/fs/cgroup/memory.current")?))
    };
    machine.into_iter().chain(group()).min()
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[cfg(test)]
mod tests;
