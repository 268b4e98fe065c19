//! Checks and errors that the [`Sampler`](super::Sampler) operations of all devices share, so that their messages are
//! the same.
//!
//! Shapes are `[live rows, width]`.

use crate::sampling::MAX_NOMINATED;
use crate::{DeviceError, Nomination, SampleRow, TokenMask};

/// Checks that rows of `width` numbers consist of pairs, at least one: the input of
/// [`best_candidates`](super::Sampler::best_candidates).
pub(crate) fn candidates(width: usize) -> Result<(), DeviceError> {
    match width {
        0 => refuse("candidates of 0 numbers".to_owned()),
        _ => pairs(width, || format!("candidates of {width} numbers")),
    }
}

/// Checks that the rows of nominations ascend and lie among the `live` rows of logits.
pub(crate) fn nominated_rows(rows: &[(usize, &Nomination)], live: usize) -> Result<(), DeviceError> {
    let ascends = rows.windows(2).all(|pair| pair[0].0 < pair[1].0);
    if ascends && rows.last().is_none_or(|(row, _)| *row < live) {
        return Ok(());
    }
    let rows: Vec<usize> = rows.iter().map(|(row, _)| *row).collect();
    refuse(format!("nominations for rows {rows:?} of {live}, which must ascend"))
}

/// Checks that rows of `width` numbers have room for all nominated tokens, two numbers each. A shard of the vocabulary
/// with `tokens` tokens nominates at most all of them.
pub(crate) fn nominated_tokens(
    rows: &[(usize, &Nomination)],
    tokens: usize,
    width: usize,
) -> Result<(), DeviceError> {
    let most = rows.iter().map(|(_, nomination)| nomination.count as usize).max().unwrap_or(0).min(tokens);
    let refused = || format!("{most} nominated tokens in rows of {width} numbers");
    pairs(width, refused)?;
    if most > (width / 2).min(MAX_NOMINATED as usize) { refuse(refused()) } else { Ok(()) }
}

/// Checks that peaks have the shape for `live` rows.
pub(crate) fn peaks([rows, width]: [usize; 2], live: usize) -> Result<(), DeviceError> {
    if [rows, width] == [live, 2] {
        return Ok(());
    }
    refuse(format!("peaks of {rows} rows and {width} numbers for {live} rows"))
}

/// Checks that the nominated rows, whose indices ascend, have candidates.
pub(crate) fn gathered([live, width]: [usize; 2], nominated: &[usize]) -> Result<(), DeviceError> {
    let refused = || format!("candidates of {width} numbers in {live} rows for {nominated:?}");
    pairs(width, refused)?;
    if nominated.last().is_some_and(|row| *row >= live) { refuse(refused()) } else { Ok(()) }
}

/// Checks that a row is one of the `live` rows of logits.
pub(crate) fn logit_row(index: usize, live: usize) -> Result<(), DeviceError> {
    if index < live { Ok(()) } else { refuse(format!("row {index} of {live} rows of logits")) }
}

/// Checks that a row of logits has the token whose score is wanted.
pub(crate) fn scored_token(token: u32, logits: usize) -> Result<(), DeviceError> {
    if (token as usize) < logits { Ok(()) } else { refuse(format!("token {token} of {logits} logits")) }
}

/// Checks, for a row whose logits are adjusted, that bias, forbidden tokens and penalties refer only to tokens of the
/// vocabulary, and that the mask has the vocabulary's size.
pub(crate) fn adjusted_tokens(row: &SampleRow<'_>, vocabulary: usize) -> Result<(), DeviceError> {
    if !row.adjusts() {
        return Ok(());
    }
    row.allowed.map_or(Ok(()), |allowed| mask(allowed, vocabulary))?;
    let biased = row.params.logit_bias.iter().map(|bias| &bias.token_id);
    let tokens = biased.chain(row.forbidden).chain(row.prompt).chain(row.output);
    match tokens.into_iter().find(|&&token| token as usize >= vocabulary) {
        Some(token) => refuse(format!("token {token} of a vocabulary of {vocabulary}")),
        None => Ok(()),
    }
}

/// Checks that a mask has the vocabulary's size.
pub(crate) fn mask(mask: &TokenMask, vocabulary: usize) -> Result<(), DeviceError> {
    match mask.words().len() {
        words if words == TokenMask::words_of(vocabulary) => Ok(()),
        words => refuse(format!("a mask of {words} words for a vocabulary of {vocabulary}")),
    }
}

/// Checks that an arg max has no masks, or one entry per row.
pub(crate) fn masks(masks: usize, rows: usize) -> Result<(), DeviceError> {
    match masks {
        0 => Ok(()),
        masks if masks == rows => Ok(()),
        masks => refuse(format!("{masks} masks for an arg max of {rows} rows")),
    }
}

/// Checks that an operation without masks has none.
pub(crate) fn no_masks(masks: usize) -> Result<(), DeviceError> {
    match masks {
        0 => Ok(()),
        masks => refuse(format!("{masks} masks for an operation that takes none")),
    }
}

/// The error of a row whose adjusted logits are all negative infinity, or not finite.
pub(crate) fn no_token_left() -> DeviceError {
    DeviceError::Misuse("mask, bias, forbidden tokens and penalties leave no token to sample".to_owned())
}

/// The error of a row with a NaN logit.
pub(crate) fn logit_is_nan() -> DeviceError {
    DeviceError::NotFinite("a logit is not a number".to_owned())
}

/// The error of a row whose largest logit is infinite.
pub(crate) fn largest_is_infinite(largest: f32) -> DeviceError {
    DeviceError::NotFinite(format!("the largest logit is {largest}"))
}

fn pairs(width: usize, refused: impl Fn() -> String) -> Result<(), DeviceError> {
    if width.is_multiple_of(2) { Ok(()) } else { refuse(refused()) }
}

fn refuse(what: String) -> Result<(), DeviceError> {
    Err(DeviceError::Misuse(what))
}

#[cfg(test)]
mod tests;
