//! A prompt cut into pieces that an index can know.
//!
//! Pieces begin as single blocks and grow with their place, so that a long prompt has few of them and what a cut leaves
//! over stays small against what is before it. Where a piece begins and ends depends on nothing but its place: prompts
//! that begin alike have the same pieces.

/// So many pieces are of one size before the next ones are twice as large.
const PIECES_OF_A_SIZE: usize = 32;

/// Where a prompt is cut, with the hash of each piece and all before it. It does not hold the prompt.
#[derive(Clone, Debug)]
pub struct PromptPieces {
    /// The tokens of all of the prompt.
    tokens: usize,
    block_tokens: usize,
    pieces_of_a_size: usize,
    hashes: Vec<u64>,
}

/// Some blocks of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    /// Of it and all before it.
    pub hash: u64,
    /// How many it is of.
    pub blocks: usize,
    pub tokens: &'a [u32],
}

impl PromptPieces {
    /// Cuts a prompt whose blocks have so many tokens, at least 1. What is left over belongs to no piece.
    pub fn new(prompt: &[u32], block_tokens: usize) -> Self {
        Self::growing(prompt, block_tokens, PIECES_OF_A_SIZE)
    }

    pub(super) fn growing(prompt: &[u32], block_tokens: usize, pieces_of_a_size: usize) -> Self {
        let mut cut = Self { pieces_of_a_size, ..Self::uncut(prompt.len(), block_tokens) };
        let (mut hash, mut left) = (0, prompt);
        while let Some((piece, rest)) =
            left.split_at_checked(cut.blocks_of(cut.hashes.len()) * cut.block_tokens)
        {
            hash = piece.iter().fold(hash, |hash, token| mix(hash ^ (u64::from(*token) + 1)));
            cut.hashes.push(hash);
            left = rest;
        }
        cut
    }

    /// Of a prompt of so many tokens, of no use to an index.
    pub fn uncut(tokens: usize, block_tokens: usize) -> Self {
        let block_tokens = block_tokens.max(1);
        Self { tokens, block_tokens, pieces_of_a_size: PIECES_OF_A_SIZE, hashes: Vec::new() }
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// How many blocks the whole prompt takes, the last one not full perhaps.
    pub fn needed(&self) -> usize {
        self.tokens.div_ceil(self.block_tokens)
    }

    /// How many blocks an index can know.
    pub fn indexable(&self) -> usize {
        (0..self.hashes.len()).map(|place| self.blocks_of(place)).sum()
    }

    /// The size of the piece in this place.
    fn blocks_of(&self, place: usize) -> usize {
        1 << (place / self.pieces_of_a_size)
    }

    /// The pieces of the prompt that this was made for.
    pub(super) fn of<'a>(&'a self, prompt: &'a [u32]) -> impl Iterator<Item = Piece<'a>> {
        let mut left = prompt;
        self.hashes.iter().enumerate().map_while(move |(place, hash)| {
            let blocks = self.blocks_of(place);
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
mod tests {
    use super::*;

    #[test]
    fn pieces_grow_and_leave_little_over() {
        for (tokens, pieces) in
            [(0, 0), (15, 0), (16, 1), (512, 32), (512 + 31, 32), (512 + 32, 33), (55_000, 214)]
        {
            let prompt: Vec<u32> = (0..tokens).collect();
            let cut = PromptPieces::new(&prompt, 16);
            assert_eq!((cut.hashes.len(), cut.of(&prompt).count()), (pieces, pieces), "{tokens} tokens");
            let over = cut.needed() - cut.indexable();
            assert!(over <= 1 + cut.needed() / 32, "{over} blocks of {}", cut.needed());
            let again: Vec<u32> = cut.of(&prompt).flat_map(|piece| piece.tokens).copied().collect();
            assert!(prompt.starts_with(&again) && again.len() == cut.indexable() * 16);
        }
    }

    #[test]
    fn prompts_that_begin_alike_have_the_same_pieces() {
        let long: Vec<u32> = (0..5000).collect();
        let (whole, begun) = (PromptPieces::new(&long, 16), PromptPieces::new(&long[..3000], 16));
        assert_eq!(begun.hashes, whole.hashes[..begun.hashes.len()]);
        let mut other = long;
        other[0] += 1;
        let other = PromptPieces::new(&other, 16);
        assert!(other.hashes.iter().zip(&whole.hashes).all(|(a, b)| a != b));
    }
}
