//! GPT-2's byte-level alphabet.

/// Returns the bytes of a token. Each character of the alphabet stands for one byte. A token with a character outside
/// of the alphabet is read as plain UTF-8, as decoders do.
pub(super) fn bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The byte of a character: printable Latin-1 characters stand for themselves, and the characters from U+0100 on stand
/// for the 68 other bytes in order.
fn byte_of(stand_in: char) -> Option<u8> {
    let code = u32::from(stand_in);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}
