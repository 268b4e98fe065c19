//! Reads a fuzzer's input piece by piece. After the end of the input, reads return zeros and empty pieces.

/// The part of an input that is not read yet.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// True if all of the input has been read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads the next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Reads the next piece: its length in two bytes, low byte first, and then its bytes.
    pub fn piece(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        let (piece, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        piece
    }

    /// Reads the next piece as text, up to its first invalid byte.
    pub fn text(&mut self) -> &'a str {
        let piece = self.piece();
        std::str::from_utf8(piece)
            .unwrap_or_else(|error| std::str::from_utf8(&piece[..error.valid_up_to()]).unwrap_or_default())
    }
}
