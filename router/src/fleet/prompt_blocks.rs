//! A prompt as its choices are placed by it.

use std::sync::Arc;

use tutti_runtime::prefix_index::PromptPieces;

/// The tokens, and where they are cut.
#[derive(Clone, Debug)]
pub struct PromptBlocks {
    pub(super) tokens: Arc<[u32]>,
    pub(super) pieces: PromptPieces,
}

impl PromptBlocks {
    /// The prompt.
    pub fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }
}
