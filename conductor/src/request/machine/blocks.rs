//! What a request takes in blocks, by which it is placed.

use tutti_runtime::prefix_index::PromptPieces;

use super::Request;

impl Request {
    /// The same request, with its prompt cut.
    #[must_use]
    pub fn cut_into(self, pieces: PromptPieces) -> Self {
        Self { pieces, ..self }
    }

    /// Where its prompt is cut.
    pub fn pieces(&self) -> &PromptPieces {
        &self.pieces
    }

    /// Blocks that its prompt and its output so far take.
    pub fn blocks(&self) -> u64 {
        (self.spec.prompt.len() + self.generated.len()).div_ceil(self.pieces.block_tokens()) as u64
    }
}
