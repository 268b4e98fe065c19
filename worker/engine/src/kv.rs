//! How many KV pages a worker has.

use std::fs;

use tutti_models::{Limits, Model};
use tutti_proto::declaration::PlaneKind;
use tutti_runtime::Error;

use crate::EngineSettings;

/// The most bytes that a KV pool takes unless told otherwise.
pub const DEFAULT_KV_BYTES: u64 = 2 << 30;

/// The share of available memory that a pool takes unless told otherwise: a worker does not know how many others
/// start beside it.
const DEFAULT_SHARE: u64 = 8;

/// The size of a pool: its pages, the null page included, and the tokens of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvSize {
    pub pages: usize,
    pub page_tokens: usize,
    pub page_bytes: usize,
}

impl KvSize {
    /// The most tokens that requests can hold.
    pub fn tokens(&self) -> usize {
        self.pages.saturating_sub(1) * self.page_tokens
    }

    pub fn bytes(&self) -> u64 {
        self.pages as u64 * self.page_bytes as u64
    }

    /// The pool that the settings and this machine give the model.
    pub fn choose(model: &dyn Model, settings: &EngineSettings) -> Result<Self, Error> {
        let [plane] = model.declaration().planes() else {
            let planes = model.declaration().planes().len();
            return Err(Error::internal(format!(
                "the model declares {planes} planes, this engine holds one"
            )));
        };
        let PlaneKind::PagedKv { page_tokens, .. } = plane.kind;
        let (page_tokens, page_bytes) = (page_tokens as usize, model.page_bytes());
        if !model.thinks() {
            // What only encodes has no pages; a scheduler has two at the least.
            return Ok(Self { pages: 2, page_tokens, page_bytes: 0 });
        }
        if page_tokens == 0 || page_bytes == 0 {
            return Err(Error::internal(format!("plane {:?} has empty pages", plane.name)));
        }
        let budget = match settings.kv_cache_memory {
            Some(bytes) => bytes,
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

/// How many KV pages, the null page included, the settings and this machine give the model: ranks of a group, whose
/// machines may differ, agree on the least.
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
    let share = available.map_or(u64::MAX, |bytes| bytes / DEFAULT_SHARE);
    enough.min(DEFAULT_KV_BYTES).min(share)
}

/// What this process could still take, in bytes: of the machine, and of its control group where that has a limit.
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
mod tests {
    use super::*;

    fn bytes(max_context_tokens: usize, available: Option<u64>) -> u64 {
        let limits = Limits { vocab_size: 8, max_context_tokens, eos_token_ids: vec![], max_step_tokens: 8 };
        let settings = EngineSettings::bounded(8, 4, 4);
        default_bytes(16, 1 << 20, &limits, &settings, available)
    }

    #[test]
    fn a_small_model_takes_what_it_can_use() {
        assert_eq!(bytes(40, None), 13 << 20, "three pages for each of four requests, and the null page");
    }

    #[test]
    fn a_large_one_takes_the_least_of_the_bounds() {
        assert_eq!(bytes(1 << 20, None), DEFAULT_KV_BYTES);
        assert_eq!(bytes(1 << 20, Some(8 << 30)), 1 << 30);
    }

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert_eq!(mem_available("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(mem_available("MemTotal: 9 kB\n"), None);
    }
}
