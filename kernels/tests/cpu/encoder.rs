//! Tests operations of encoders of pictures and sound against double precision.

use std::{ops::Range, slice};

use tutti_kernels::{Device, Encoder, EncoderHeads, Gelu, LayerNorm, SegmentAttention};

use crate::support::{Random, assert_near, bits, devices, tensor};

/// Attention in both directions inside each segment.
fn attended(qkv: &[f32], shape: EncoderHeads, segments: &[Range<usize>]) -> Vec<f32> {
    let EncoderHeads { heads, head_dim } = shape;
    let width = heads * head_dim;
    let head = |row: usize, part: usize, head: usize| {
        qkv[row * 3 * width + part * width + head * head_dim..][..head_dim].iter().map(|x| f64::from(*x))
    };
    let mut out = Vec::new();
    for segment in segments {
        for (row, index) in segment.clone().flat_map(|row| (0..heads).map(move |index| (row, index))) {
            let score = |key| head(row, 0, index).zip(head(key, 1, index)).map(|(q, k)| q * k).sum::<f64>();
            let scores: Vec<f64> = segment.clone().map(|key| score(key) / (head_dim as f64).sqrt()).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sums = vec![0.0; head_dim];
            for (key, weight) in segment.clone().zip(weights) {
                sums.iter_mut().zip(head(key, 2, index)).for_each(|(sum, value)| *sum += weight * value);
            }
            out.extend(sums.into_iter().map(|sum| (sum / total) as f32));
        }
    }
    out
}

/// Segments of 1,024 patches and more are computed in several passes over keys, whose largest scores differ.
#[test]
fn attention_inside_segments_is_that_of_double_precision() {
    let lengths = [1, 15, 256, 257, 700];
    let starts = lengths.iter().scan(0, |at, length| {
        *at += length;
        Some(*at - length..*at)
    });
    let segments: Vec<Range<usize>> = starts.collect();
    let rows: usize = lengths.iter().sum();
    for (heads, head_dim) in [(2, 24), (1, 72)] {
        let shape = EncoderHeads { heads, head_dim };
        let width = 3 * heads * head_dim;
        let mut qkv = Random::new(7).normals(rows * width, 1.0);
        // Later keys have larger scores, so that each pass rescales what the passes before it have added.
        for (row, values) in qkv.chunks_mut(width).enumerate() {
            let growth = 1.0 + row as f32 / 400.0;
            values[width / 3..2 * width / 3].iter_mut().for_each(|key| *key *= growth);
        }
        let want = attended(&qkv, shape, &segments);
        let mut by_path: Vec<(String, Vec<u32>)> = Vec::new();
        for (name, mut device) in devices("segments") {
            let x = tensor(&mut device, width, &qkv);
            let mut out = device.tensor(rows, heads * head_dim).unwrap();
            let attention = SegmentAttention { qkv: &x, shape, segments: &segments };
            device.segment_attention(attention, &mut out).unwrap();
            assert_near(&format!("{name}, heads of {head_dim}"), out.values(), &want, 2e-6);
            // A segment has the same bits without the others.
            let (first, alone) = (segments[4].start, segments[4].len());
            let x = tensor(&mut device, width, &qkv[first * width..]);
            let whole = 0..alone;
            let attention = SegmentAttention { qkv: &x, shape, segments: slice::from_ref(&whole) };
            let mut last = device.tensor(alone, heads * head_dim).unwrap();
            device.segment_attention(attention, &mut last).unwrap();
            assert_eq!(bits(last.values()), bits(&out.values()[first * heads * head_dim..]), "{name}");
            let path = name.split(" with ").next().unwrap().to_owned();
            match by_path.iter().find(|(other, _)| *other == path) {
                Some((_, one)) => assert_eq!(*one, bits(out.values()), "{name}: one thread and two"),
                None => by_path.push((path, bits(out.values()))),
            }
        }
    }
}

#[test]
fn norms_of_layers_are_those_of_double_precision() {
    let (rows, width) = (5, 203);
    let mut random = Random::new(8);
    let x: Vec<f32> = random.normals(rows * width, 2.0).into_iter().map(|x| x + 3.0).collect();
    let (weight, bias) = (random.normals(width, 1.0), random.normals(width, 1.0));
    let want: Vec<f32> = x
        .chunks(width)
        .flat_map(|row| {
            let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
            let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / width as f64;
            let scale = (variance + 1e-6).sqrt().recip();
            let (weight, bias) = (&weight, &bias);
            let of = move |i: usize| {
                ((f64::from(row[i]) - mean) * scale * f64::from(weight[i]) + f64::from(bias[i])) as f32
            };
            (0..width).map(of).collect::<Vec<_>>()
        })
        .collect();
    for (name, mut device) in devices("layer norm") {
        let x = tensor(&mut device, width, &x);
        let (weight, bias) = (device.vector(&weight).unwrap(), device.vector(&bias).unwrap());
        let mut out = device.tensor(rows, width).unwrap();
        let norm = LayerNorm { weight: &weight, bias: &bias, eps: 1e-6 };
        device.layer_norm(&x, norm, &mut out).unwrap();
        assert_near(&name, out.values(), &want, 2e-5);
    }
}

/// Values of the error function from its series, which converges quickly enough below 4.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

#[test]
fn gelu_is_that_of_double_precision() {
    let x: Vec<f32> = (-2000..=2000).map(|i| i as f32 / 200.0).chain([-1e30, -40.0, 40.0, 1e30]).collect();
    let exact = |x: f64| x * (1.0 + erf(x / 2f64.sqrt())) / 2.0;
    let tanh = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        x * (1.0 + inner.tanh()) / 2.0
    };
    let forms: [(Gelu, &dyn Fn(f64) -> f64); 2] = [(Gelu::Exact, &exact), (Gelu::Tanh, &tanh)];
    for (name, mut device) in devices("gelu") {
        for (form, of) in forms {
            let want: Vec<f32> = x.iter().map(|x| of(f64::from(*x)) as f32).collect();
            let mut out = tensor(&mut device, x.len(), &x);
            device.gelu(form, &mut out).unwrap();
            for ((x, got), want) in x.iter().zip(out.values()).zip(&want) {
                let bound = 2e-6 * want.abs().max(1.0);
                assert!((got - want).abs() <= bound, "{name} {form:?}: {x} gives {got}, not {want}");
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let (_, mut device) = devices("refusals").into_iter().next().unwrap();
    let shape = EncoderHeads { heads: 1, head_dim: 8 };
    let qkv = tensor(&mut device, 24, &[0.0; 4 * 24]);
    let mut out = device.tensor(4, 8).unwrap();
    for segments in [&[0..2, 3..4][..], &[0..2, 2..5], &[0..2, 2..2, 2..4], &[1..2, 2..4], &[]] {
        let refused = device.segment_attention(SegmentAttention { qkv: &qkv, shape, segments }, &mut out);
        assert!(refused.unwrap_err().to_string().contains("4 rows of attention"), "{segments:?}");
    }
    let none = EncoderHeads { heads: 0, head_dim: 8 };
    let whole = 0..4;
    let attention = SegmentAttention { qkv: &qkv, shape: none, segments: slice::from_ref(&whole) };
    assert!(device.segment_attention(attention, &mut out).is_err());
    let angles = tensor(&mut device, 8, &[0.0; 3 * 8]);
    let mut rotated = tensor(&mut device, 24, &[0.0; 4 * 24]);
    let refused = device.rotate_heads(shape, &angles, &mut rotated).unwrap_err().to_string();
    assert!(refused.contains("angles of 3 rows for 4 rows"), "{refused}");
    let refused = device.add_rows(&mut rotated, 3, &[0.0; 48]).unwrap_err().to_string();
    assert!(refused.contains("48 values from row 3 on for 4 rows of 24"), "{refused}");
    assert!(device.add_rows(&mut rotated, usize::MAX, &[0.0; 24]).is_err());
}
