//! The size of a request in blocks, which placement uses.

use tutti_runtime::prefix_index::PromptPieces;

use super::Request;

impl Request {
    /// The prompt's pieces, by which the prefix index finds cached prefixes.
    pub fn pieces(&self) -> &PromptPieces {
        &self.pieces
    }

    /// Number of blocks of the prompt and of the output so far.
    pub fn blocks(&self) -> u64 {
        (self.spec.prompt.len() + self.generated.len()).div_ceil(self.pieces.block_tokens()) as u64
    }
}
