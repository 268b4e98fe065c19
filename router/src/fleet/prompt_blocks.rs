//! A prompt cut into blocks. Conductors are compared by the number of these blocks that they have cached.

use std::sync::Arc;

use tutti_runtime::prefix_index::PromptPieces;

/// A prompt's tokens, and the blocks into which they are cut.
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
