//! Entries and attention in double precision, as plain as they can be written.

use tutti_kernels::{CompressorShape, IndexerShape, RopeFrequencies};

use super::layer::{Case, CompressorWeights, EPS, Layer, Request};
use crate::support::stored;

/// Rotates the last elements in adjacent pairs.
pub fn rotate(head: &mut [f64], position: f64, rope: &RopeFrequencies) {
    let first = head.len() - 2 * rope.inverse.len();
    for (i, &inverse) in rope.inverse.iter().enumerate() {
        // Angles are rounded to f32.
        let angle = f64::from(position as f32 * inverse);
        let (a, b) = (head[first + 2 * i], head[first + 2 * i + 1]);
        head[first + 2 * i] = a * angle.cos() - b * angle.sin();
        head[first + 2 * i + 1] = b * angle.cos() + a * angle.sin();
    }
}

/// The entries of a request's first `tokens` tokens in one plane.
pub fn entries(layer: &Layer, request: &Request, plane: usize, tokens: usize) -> Vec<f64> {
    let CompressorWeights { shape, offsets, norm } = &layer.compressors[plane];
    let CompressorShape { ratio, width, parts } = *shape;
    let projected = &request.projected[plane];
    let mut out = Vec::new();
    for window in 0..tokens / ratio {
        let mut entry = Vec::new();
        for channel in 0..width {
            // (gate, k) of each token that takes part.
            let mut terms = Vec::new();
            let mut add = |window: usize, part: usize| {
                for index in 0..ratio {
                    let token = &projected[(window * ratio + index) * shape.projected()..];
                    let at = part * width + channel;
                    let offset = offsets[index * parts * width + at];
                    let gate = f64::from(token[parts * width + at]) + f64::from(offset);
                    terms.push((gate, f64::from(token[at])));
                }
            };
            if parts == 2 && window > 0 {
                add(window - 1, 0);
            }
            add(window, parts - 1);
            let largest = terms.iter().fold(f64::NEG_INFINITY, |largest, (gate, _)| largest.max(*gate));
            let total: f64 = terms.iter().map(|(gate, _)| (gate - largest).exp()).sum();
            entry.push(terms.iter().map(|(gate, k)| (gate - largest).exp() * k).sum::<f64>() / total);
        }
        let mean = entry.iter().map(|x| x * x).sum::<f64>() / width as f64;
        for (x, weight) in entry.iter_mut().zip(norm) {
            *x = *x / (mean + f64::from(EPS)).sqrt() * f64::from(*weight);
        }
        rotate(&mut entry, (window * ratio) as f64, &layer.rope);
        out.extend(entry);
    }
    out
}

/// The entries that the token at `position` attends to, in ascending order.
fn chosen(layer: &Layer, request: &Request, keys: &[f32], position: usize, visible: usize) -> Vec<usize> {
    let Some(IndexerShape { heads, head_dim, top_k }) = layer.case.indexer else {
        return (0..visible).collect();
    };
    let score = |entry: usize| {
        let key = &keys[entry * head_dim..][..head_dim];
        let of_head = |head: usize| {
            let query = &request.index_queries[(position * heads + head) * head_dim..][..head_dim];
            let product: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            f64::from(request.index_weights[position * heads + head]) * product.max(0.0)
        };
        (0..heads).map(of_head).sum::<f64>()
    };
    let mut order: Vec<(f64, usize)> = (0..visible).map(|entry| (score(entry), entry)).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    if let (Some(last), Some(next)) = (order.get(top_k - 1), order.get(top_k)) {
        // Scores without a positive product are 0 in f32, too.
        let gap = last.0 - next.0;
        assert!(gap > 1e-5 || gap == 0.0, "scores too close for this test at position {position}");
    }
    let mut chosen: Vec<usize> = order.into_iter().take(top_k).map(|(_, entry)| entry).collect();
    chosen.sort_unstable();
    chosen
}

/// The attention of a request's first `tokens` tokens. `entries` are those of each plane.
pub fn attention(layer: &Layer, request: &Request, entries: &[Vec<f32>], tokens: usize) -> Vec<f64> {
    let Case { heads, head_dim, window, dtype, compressor, .. } = layer.case;
    let mut out = Vec::new();
    for position in 0..tokens {
        let mut keys: Vec<Vec<f64>> = (position.saturating_sub(window - 1)..=position)
            .map(|position| {
                let key = &request.kv[position * head_dim..][..head_dim];
                key.iter().map(|&x| f64::from(stored(dtype, x))).collect()
            })
            .collect();
        if let Some((ratio, _)) = compressor {
            let visible = (position + 1) / ratio;
            let index_keys = entries.get(1).map_or(&[][..], |keys| keys);
            for entry in chosen(layer, request, index_keys, position, visible) {
                keys.push(entries[0][entry * head_dim..][..head_dim].iter().map(|&x| x.into()).collect());
            }
        }
        for head in 0..heads {
            let q = &request.q[(position * heads + head) * head_dim..][..head_dim];
            let scores: Vec<f64> = keys
                .iter()
                .map(|key| {
                    let product: f64 = q.iter().zip(key).map(|(&q, k)| f64::from(q) * k).sum();
                    product / (head_dim as f64).sqrt()
                })
                .collect();
            let sink = f64::from(layer.sinks[head]);
            let total: f64 = scores.iter().map(|score| score.exp()).sum::<f64>() + sink.exp();
            for d in 0..head_dim {
                out.push(scores.iter().zip(&keys).map(|(score, key)| score.exp() / total * key[d]).sum());
            }
        }
    }
    out
}
