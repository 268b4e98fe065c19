//! A prompt cut into pieces that can be indexed.
//!
//! The first pieces are single blocks, and later pieces are larger, so that a long prompt has few pieces and the uncut
//! rest is small relative to the prompt. The boundaries of a piece depend on its index alone, so prompts with a common
//! prefix have common first pieces.

use tutti_proto::CacheSalt;

/// Number of consecutive pieces of one size. The pieces after them are twice as large.
const PIECES_OF_A_SIZE: usize = 32;

/// The pieces into which a prompt is cut, as one hash per piece. The prompt's tokens are not stored.
#[derive(Clone, Debug)]
pub struct PromptPieces {
    /// Number of tokens of the prompt.
    tokens: usize,
    block_tokens: usize,
    pieces_of_a_size: usize,
    /// Prompts with unequal salts have no piece in common.
    pub(super) salt: CacheSalt,
    /// For each piece, the hash of the salt and of all tokens up to the piece's end.
    hashes: Vec<u64>,
}

/// A piece: consecutive blocks of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    /// Hash of the salt and of all tokens up to the piece's end.
    pub hash: u64,
    /// Number of blocks.
    pub blocks: usize,
    pub tokens: &'a [u32],
}

impl PromptPieces {
    /// Cuts a prompt into pieces of blocks of `block_tokens` tokens, where 0 counts as 1. Tokens at the end that do not
    /// fill a piece belong to no piece.
    pub fn new(prompt: &[u32], salt: CacheSalt, block_tokens: usize) -> Self {
        Self { salt, ..Self::uncut(prompt.len(), block_tokens) }.with_hashes(prompt)
    }

    /// As [`PromptPieces::new`] without a salt, with another number of pieces of one size.
    #[cfg(test)]
    pub(super) fn growing(prompt: &[u32], block_tokens: usize, pieces_of_a_size: usize) -> Self {
        Self { pieces_of_a_size, ..Self::uncut(prompt.len(), block_tokens) }.with_hashes(prompt)
    }

    fn with_hashes(self, prompt: &[u32]) -> Self {
        let mut cut = self;
        // A step of the hash is a bijection of the hash so far. So prompts of the same tokens with unequal salts have
        // unequal hashes.
        let (mut hash, mut left) = (cut.salt.hash_seed(), prompt);
        while let Some((piece, rest)) =
            left.split_at_checked(cut.blocks_of(cut.hashes.len()) * cut.block_tokens)
        {
            hash = piece.iter().fold(hash, |hash, token| mix(hash ^ (u64::from(*token) + 1)));
            cut.hashes.push(hash);
            left = rest;
        }
        cut
    }

    /// The size of a prompt, without pieces. For callers that do not look up the prompt in an index.
    pub fn uncut(tokens: usize, block_tokens: usize) -> Self {
        let block_tokens = block_tokens.max(1);
        let (pieces_of_a_size, salt) = (PIECES_OF_A_SIZE, CacheSalt::default());
        Self { tokens, block_tokens, pieces_of_a_size, salt, hashes: Vec::new() }
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Number of blocks that the whole prompt takes. The last block may be partial.
    pub fn needed(&self) -> usize {
        self.tokens.div_ceil(self.block_tokens)
    }

    /// Number of blocks in the pieces.
    pub fn indexable(&self) -> usize {
        (0..self.hashes.len()).map(|index| self.blocks_of(index)).sum()
    }

    /// Number of blocks in piece `index`, counted from 0.
    fn blocks_of(&self, index: usize) -> usize {
        1 << (index / self.pieces_of_a_size)
    }

    /// The pieces of `prompt`, which must be the prompt that was cut.
    pub(super) fn of<'a>(&'a self, prompt: &'a [u32]) -> impl Iterator<Item = Piece<'a>> {
        let mut left = prompt;
        self.hashes.iter().enumerate().map_while(move |(index, hash)| {
            let blocks = self.blocks_of(index);
            let (tokens, rest) = left.split_at_checked(blocks * self.block_tokens)?;
            left = rest;
            Some(Piece { hash: *hash, blocks, tokens })
        })
    }

    #[cfg(test)]
    pub(super) fn hashes_mut(&mut self) -> impl Iterator<Item = &mut u64> {
        self.hashes.iter_mut()
    }
}

/// A bijection that spreads nearby numbers (MurmurHash3's finaliser, Appleby, 2011).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests;
