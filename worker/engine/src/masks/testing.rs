//! A small vocabulary for tests.

use tutti_constraints::{Token, Vocabulary};

/// The end token of [`bytes`].
pub(crate) const END: u32 = 256;

/// A vocabulary with a token for each byte that text can have, whose id is the byte, and an end token.
pub(crate) fn bytes() -> Vocabulary {
    let byte = |byte: u8| if byte < u8::MAX { Token::Text(vec![byte]) } else { Token::Unused };
    let tokens = (0..=u8::MAX).map(byte).chain([Token::Special("<end>".to_owned())]);
    Vocabulary::new(tokens.collect(), &[END]).unwrap()
}
