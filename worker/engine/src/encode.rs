//! Runs the encoder calls of a row.

use std::ops::Range;

use tutti_kernels::DeviceError;
use tutti_models::{EncoderItem, Model};
use tutti_settings::ChunkShapes;

use crate::{
    encoder_cache::EncoderCache,
    media::{EncodedItem, Encoding},
};

/// Runs the encoder calls whose embeddings lie within the range `rows`, unless the embeddings are in `cache`, and
/// returns the embeddings. A range that cuts a call is refused. Calls are padded to `shapes`.
pub(crate) fn encode(
    model: &mut dyn Model,
    cache: &mut EncoderCache,
    rows: &Range<usize>,
    encodings: &[Encoding],
    shapes: Option<&ChunkShapes>,
) -> Result<Vec<f32>, DeviceError> {
    let mut out = Vec::new();
    let touched = |call: &&Encoding| call.rows.start < rows.end && rows.start < call.rows.end;
    for call in encodings.iter().filter(touched) {
        let Encoding { walk, rows: own, width, items, key } = call;
        if own.start < rows.start || own.end > rows.end {
            return Err(DeviceError::Misuse(format!("rows {rows:?} cut the encoding of rows {own:?}")));
        }
        if let Some(found) = cache.find(key.as_ref()) {
            out.extend_from_slice(found);
            continue;
        }
        let before = out.len();
        let items: Vec<EncoderItem<'_>> = items.iter().map(EncodedItem::view).collect();
        let shape = shapes.and_then(|shapes| shapes.fit(own.len()));
        model.encode(*walk, &items, shape, &mut out)?;
        cache.count_padding(shape.map_or(0, |shape| shape - own.len()));
        let encoded = &out[before..];
        let (values, embeddings) = (encoded.len(), own.len());
        if values != call.values() {
            return Err(DeviceError::Lost(format!("{values} values for {embeddings} embeddings of {width}")));
        }
        if !encoded.iter().all(|value| value.is_finite()) {
            return Err(DeviceError::NotFinite(format!("some of {embeddings} embeddings are no numbers")));
        }
        if let Some(key) = key {
            cache.keep(key, encoded);
        }
    }
    Ok(out)
}
