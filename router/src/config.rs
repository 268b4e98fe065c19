//! What an operator may set about the front door.

use serde::{Deserialize, Serialize};
use tutti_runtime::Error;

/// Settings of a front door, embedded or on its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Serve token ids only; the checkpoint's tokenizer and chat template are not read.
    pub skip_tokenizer_init: bool,
    /// The largest HTTP body or gRPC message, in bytes. A larger one is refused before it is read.
    pub max_body_bytes: usize,
    /// How many choices (`n` times the prompts of each request) may be under way at once. One request with more
    /// than this is refused for good, one that comes at a busy moment may come back.
    pub max_concurrent_choices: u32,
    /// How many texts are tokenised, and templates rendered, at the same time.
    pub tokenizer_threads: usize,
    /// How many more texts may wait for that.
    pub tokenizer_queue: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            skip_tokenizer_init: false,
            max_body_bytes: 32 << 20,
            max_concurrent_choices: 1024,
            // Tokenising beyond half of the cores would slow the streams that already run.
            tokenizer_threads: (cores / 2).clamp(1, 8),
            tokenizer_queue: 512,
        }
    }
}

impl RouterConfig {
    /// Refuses values under which nothing could be served.
    pub fn validate(&self) -> Result<(), Error> {
        let positive = |field: &str, value: usize| match value {
            0 => Err(Error::invalid(field, "is 0, but must be at least 1")),
            _ => Ok(()),
        };
        positive("max_body_bytes", self.max_body_bytes)?;
        positive("max_concurrent_choices", self.max_concurrent_choices as usize)?;
        positive("tokenizer_threads", self.tokenizer_threads)?;
        positive("tokenizer_queue", self.tokenizer_queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_zero_is_refused_by_name() {
        assert_eq!(RouterConfig::default().validate(), Ok(()));
        let error = RouterConfig { tokenizer_threads: 0, ..RouterConfig::default() }.validate().unwrap_err();
        assert_eq!(error.field(), Some("tokenizer_threads"));
    }
}
