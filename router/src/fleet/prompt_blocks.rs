//! A prompt cut into blocks, by which conductors are compared.

use std::sync::Arc;

use tutti_runtime::prefix_index::PromptPieces;

/// A prompt's tokens, and their blocks.
#[derive(Clone, Debug)]
pub struct PromptBlocks {
    pub(super) tokens: Arc<[u32]>,
    pub(super) pieces: PromptPieces,
}

impl PromptBlocks {
    /// The prompt's tokens.
    pub fn tokens(&self) -> &Arc<[u32]> {
        &self.tokens
    }
}
