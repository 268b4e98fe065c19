//! The functions that compute a request's next token. `tests/cluster/lib/simulated.py` implements them in Python.

/// The digest of an empty sequence.
pub const EMPTY: u64 = 0;

/// 2^64 divided by the golden ratio: an odd number whose bits are well spread.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the digest of a sequence extended by one token.
pub fn extend(digest: u64, token: u32) -> u64 {
    mix(digest ^ (u64::from(token) + 1).wrapping_mul(SPREAD))
}

/// Returns the token that follows a sequence.
pub fn token(digest: u64, seed: u64, vocab_size: u32) -> u32 {
    (mix(digest ^ mix(seed)) % u64::from(vocab_size)) as u32
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014): every bit of the input reaches every bit of the output.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
