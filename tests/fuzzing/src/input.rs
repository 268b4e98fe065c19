//! Reads a fuzzer's input piece by piece. An input that ends gives zeros and empty pieces.

/// The rest of an input.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// True at the end.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// The next piece: its length in two bytes, the low one first, and its bytes.
    pub fn piece(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        let (piece, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        piece
    }

    /// The next piece as text, up to its first invalid byte.
    pub fn text(&mut self) -> &'a str {
        let piece = self.piece();
        std::str::from_utf8(piece)
            .unwrap_or_else(|error| std::str::from_utf8(&piece[..error.valid_up_to()]).unwrap_or_default())
    }
}
