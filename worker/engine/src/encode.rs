//! Runs the encoder calls of a row.

use std::ops::Range;

use tutti_kernels::DeviceError;
use tutti_models::{EncoderItem, Model};

use crate::media::{EncodedItem, Encoding};

/// Runs the encoder calls whose embeddings lie within the range `rows`, and returns the embeddings. A range that cuts a
/// call is refused.
pub(crate) fn encode(
    model: &mut dyn Model,
    rows: &Range<usize>,
    encodings: &[Encoding],
) -> Result<Vec<f32>, DeviceError> {
    let mut out = Vec::new();
    let touched = |call: &&Encoding| call.rows.start < rows.end && rows.start < call.rows.end;
    for call in encodings.iter().filter(touched) {
        let Encoding { walk, rows: own, width, items } = call;
        if own.start < rows.start || own.end > rows.end {
            return Err(DeviceError::Misuse(format!("rows {rows:?} cut the encoding of rows {own:?}")));
        }
        let before = out.len();
        let items: Vec<EncoderItem<'_>> = items.iter().map(EncodedItem::view).collect();
        model.encode(*walk, &items, &mut out)?;
        let encoded = &out[before..];
        let (values, embeddings) = (encoded.len(), own.len());
        if values != call.values() {
            return Err(DeviceError::Lost(format!("{values} values for {embeddings} embeddings of {width}")));
        }
        if !encoded.iter().all(|value| value.is_finite()) {
            return Err(DeviceError::NotFinite(format!("some of {embeddings} embeddings are no numbers")));
        }
    }
    Ok(out)
}
