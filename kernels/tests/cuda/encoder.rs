//! Tests operations of encoders of pictures and sound against the CPU device, and that a row's bits depend on its
//! segment only.

use std::ops::Range;

use tutti_kernels::cuda::CudaDevice;
use tutti_kernels::{
    Device, DeviceError, Encoder, EncoderHeads, Gelu, LayerNorm, PixelGrid, SegmentAttention,
};

use crate::support::{Case, Families, Random, bits, compare, cuda, tensor, values};

/// Layer norms of rows of this width, whose mean is far from 0.
struct Norms {
    rows: usize,
    width: usize,
}

impl Norms {
    fn input(&self) -> Vec<f32> {
        let normals = Random::new(self.width as u64).normals(self.rows * self.width, 2.0);
        normals.into_iter().enumerate().map(|(i, x)| x + (i / self.width) as f32).collect()
    }

    fn of<D: Families>(&self, device: &mut D, x: &[f32]) -> Vec<f32> {
        let mut random = Random::new(8);
        let (weight, bias) = (random.normals(self.width, 1.0), random.normals(self.width, 1.0));
        let (weight, bias) = (device.vector(&weight).unwrap(), device.vector(&bias).unwrap());
        let x = tensor(device, self.width, x);
        let mut out = device.tensor(self.rows + 1, self.width).unwrap();
        device.layer_norm(&x, LayerNorm { weight: &weight, bias: &bias, eps: 1e-2 }, &mut out).unwrap();
        values(device, &out)
    }
}

impl Case for Norms {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        self.of(device, &self.input())
    }
}

#[test]
fn norms_of_layers_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("layer norms") else { return };
    for (rows, width) in [(1, 1), (9, 16), (5, 19), (4, 255), (3, 1024), (7, 1152), (1, 2049)] {
        let case = Norms { rows, width };
        compare(&mut gpu, &format!("{rows} rows of {width}"), &case, 5e-6);
        let (all, x) = (bits(&case.run(&mut gpu)), case.input());
        let last = &x[(rows - 1) * width..];
        assert_eq!(bits(&Norms { rows: 1, width }.of(&mut gpu, last)), all[(rows - 1) * width..]);
    }
}

struct Gelus {
    form: Gelu,
    count: usize,
}

impl Case for Gelus {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let mut x: Vec<f32> = (0..self.count).map(|i| (i as f32 - 1000.0) / 150.0).collect();
        x[0] = 30.0;
        let mut x = tensor(device, self.count, &x);
        device.gelu(self.form, &mut x).unwrap();
        let (mut all, limits) = (values(device, &x), [-1e30, -40.0, 0.0, -0.0]);
        let mut x = tensor(device, 1, &limits);
        device.gelu(self.form, &mut x).unwrap();
        all.extend(values(device, &x));
        let mut x = tensor(device, 1, &[1e30, f32::NAN]);
        device.gelu(self.form, &mut x).unwrap();
        let large = values(device, &x);
        assert!(large[0] == 1e30 && large[1].is_nan(), "{:?} gives {large:?}", self.form);
        all
    }
}

/// The two forms differ by up to 5e-4.
#[test]
fn gelus_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("gelus") else { return };
    for form in [Gelu::Exact, Gelu::Tanh] {
        for count in [1, 3, 2000, 2001] {
            compare(&mut gpu, &format!("{form:?} of {count}"), &Gelus { form, count }, 2e-7);
        }
    }
}

/// The shapes of encoders: heads of the goldens, of the vision towers and of the audio towers, and heads that fill none
/// of the kernels' sizes.
const SHAPES: [EncoderHeads; 6] = [
    EncoderHeads { heads: 2, head_dim: 24 },
    EncoderHeads { heads: 3, head_dim: 72 },
    EncoderHeads { heads: 2, head_dim: 64 },
    EncoderHeads { heads: 1, head_dim: 128 },
    EncoderHeads { heads: 3, head_dim: 34 },
    EncoderHeads { heads: 1, head_dim: 2 },
];

struct Rotations(EncoderHeads);

impl Case for Rotations {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let EncoderHeads { heads, head_dim } = self.0;
        let (rows, width, mut random) = (5, 3 * heads * head_dim, Random::new(4));
        let angles = tensor(device, head_dim, &random.normals(rows * head_dim, 1.0));
        let mut qkv = tensor(device, width, &random.normals(rows * width, 1.0));
        device.rotate_heads(self.0, &angles, &mut qkv).unwrap();
        values(device, &qkv)
    }
}

#[test]
fn rotations_of_heads_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("rotations of heads") else { return };
    for shape in SHAPES {
        compare(&mut gpu, &format!("{shape:?}"), &Rotations(shape), 1e-6);
    }
}

/// Segments of these lengths, one after another.
fn segments(lengths: &[usize]) -> Vec<Range<usize>> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end - length..*end)
    });
    ends.collect()
}

struct Segments<'a> {
    shape: EncoderHeads,
    lengths: &'a [usize],
}

impl Segments<'_> {
    /// Later keys have larger scores, so that each tile of keys rescales what the tiles before it have added.
    fn input(&self) -> Vec<f32> {
        let width = 3 * self.shape.heads * self.shape.head_dim;
        let mut qkv = Random::new(7).normals(self.lengths.iter().sum::<usize>() * width, 1.0);
        for (row, values) in qkv.chunks_mut(width).enumerate() {
            let growth = 1.0 + row as f32 / 100.0;
            values[width / 3..2 * width / 3].iter_mut().for_each(|key| *key *= growth);
        }
        qkv
    }

    fn of<D: Families>(&self, device: &mut D, qkv: &[f32]) -> Vec<f32> {
        let width = self.shape.heads * self.shape.head_dim;
        let x = tensor(device, 3 * width, qkv);
        let mut out = device.tensor(qkv.len() / (3 * width) + 1, width).unwrap();
        let segments = segments(self.lengths);
        let attention = SegmentAttention { qkv: &x, shape: self.shape, segments: &segments };
        device.segment_attention(attention, &mut out).unwrap();
        values(device, &out)
    }
}

impl Case for Segments<'_> {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        self.of(device, &self.input())
    }
}

/// Single rows, many short segments, and segments around the ends of tiles of 16, 32 and 64 rows.
const LENGTHS: [&[usize]; 4] = [&[1], &[1; 9], &[15, 1, 16, 17, 33, 2], &[64, 65, 130]];

#[test]
fn attention_inside_segments_is_that_of_the_cpu() {
    let Some(mut gpu) = cuda("attention inside segments") else { return };
    for shape in SHAPES {
        for lengths in LENGTHS {
            compare(&mut gpu, &format!("{shape:?} in {lengths:?}"), &Segments { shape, lengths }, 3e-6);
        }
    }
}

#[test]
fn a_segment_has_its_bits_beside_any_other_segments() {
    let Some(mut gpu) = cuda("bits of segments") else { return };
    for shape in SHAPES {
        let width = shape.heads * shape.head_dim;
        for lengths in LENGTHS {
            let case = Segments { shape, lengths };
            let (x, all) = (case.input(), bits(&case.run(&mut gpu)));
            for rows in segments(lengths) {
                let alone = Segments { shape, lengths: &[rows.len()] };
                let alone = alone.of(&mut gpu, &x[rows.start * 3 * width..rows.end * 3 * width]);
                let same = bits(&alone) == all[rows.start * width..rows.end * width];
                assert!(same, "{shape:?}: rows {rows:?} of {lengths:?} have other bits alone");
            }
        }
    }
}

/// Neither values that are not finite nor rows behind the last reach other segments.
#[test]
fn values_that_are_not_finite_stay_in_their_segment() {
    let Some(mut gpu) = cuda("segments that are not finite") else { return };
    let shape = EncoderHeads { heads: 2, head_dim: 24 };
    let case = Segments { shape, lengths: &[5, 40, 3] };
    let (mut x, clean) = (case.input(), bits(&case.run(&mut gpu)));
    x[5 * 144..45 * 144].fill(f32::NAN);
    let spoilt = case.of(&mut gpu, &x);
    assert!(spoilt[5 * 48..45 * 48].iter().all(|x| x.is_nan()));
    assert!(bits(&spoilt)[..5 * 48] == clean[..5 * 48] && bits(&spoilt)[45 * 48..] == clean[45 * 48..]);
}

struct Windows {
    grid: PixelGrid,
    channels: usize,
}

impl Case for Windows {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let pixels = Random::new(5).normals(self.grid.pixels() * self.channels, 1.0);
        let x = tensor(device, self.channels, &pixels);
        let mut out = device.tensor(self.grid.halved().pixels() + 1, 9 * self.channels).unwrap();
        device.gather_convolution(self.grid, &x, &mut out).unwrap();
        values(device, &out)
    }
}

#[test]
fn windows_of_convolutions_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("windows of convolutions") else { return };
    for (pictures, height, width) in [(1, 1, 1), (1, 16, 7), (3, 5, 4), (2, 2, 2), (1, 3, 9)] {
        for channels in [1, 8, 61] {
            let case = Windows { grid: PixelGrid { pictures, height, width }, channels };
            compare(&mut gpu, &format!("{:?} of {channels} channels", case.grid), &case, 0.0);
        }
    }
}

/// Joined rows, to which positions and features are added: a few, and more than are copied at once.
struct Rows {
    width: usize,
    rows: usize,
}

impl Case for Rows {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let Self { width, rows } = *self;
        let mut random = Random::new(6);
        let x = random.normals(4 * rows * width, 1.0);
        let x = tensor(device, width, &x);
        let mut joined = device.tensor(rows, 4 * width).unwrap();
        device.join_rows(&x, &mut joined).unwrap();
        device.add_rows(&mut joined, 0, &random.normals(4 * rows * width, 1.0)).unwrap();
        device.add_rows(&mut joined, rows - 1, &random.normals(4 * width, 1.0)).unwrap();
        device.add_rows(&mut joined, rows, &[]).unwrap();
        values(device, &joined)
    }
}

#[test]
fn joined_and_added_rows_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("joined and added rows") else { return };
    for (width, rows) in [(1, 1), (19, 3), (32, 7), (640, 515)] {
        compare(&mut gpu, &format!("{rows} rows of {width}"), &Rows { width, rows }, 0.0);
    }
}

/// Calls outside of steps reuse the memory of their inputs.
#[test]
fn calls_of_an_encoder_leave_no_memory_behind() {
    let Some(mut gpu) = cuda("memory of encoders") else { return };
    let case = Segments { shape: EncoderHeads { heads: 1, head_dim: 24 }, lengths: &[3, 4] };
    let width = 3 * 24;
    let mut x = tensor(&mut gpu, width, &case.input());
    let mut out = gpu.tensor(7, 24).unwrap();
    let mut call = |gpu: &mut CudaDevice| {
        gpu.upload(&case.input(), &mut x).unwrap();
        gpu.add_rows(&mut x, 0, &vec![1.0; width]).unwrap();
        let segments = segments(case.lengths);
        let attention = SegmentAttention { qkv: &x, shape: case.shape, segments: &segments };
        gpu.segment_attention(attention, &mut out).unwrap();
        values(gpu, &out);
    };
    (0..3).for_each(|_| call(&mut gpu));
    let bytes = gpu.step_bytes();
    (0..20).for_each(|_| call(&mut gpu));
    assert_eq!(gpu.step_bytes(), bytes);
}

#[test]
fn operands_of_encoders_that_do_not_fit_are_refused() {
    let Some(mut gpu) = cuda("operands of encoders") else { return };
    let shape = EncoderHeads { heads: 1, head_dim: 8 };
    let qkv = tensor(&mut gpu, 24, &[0.0; 4 * 24]);
    let mut out = gpu.tensor(4, 8).unwrap();
    let mut attend = |gpu: &mut CudaDevice, shape, segments: &[Range<usize>]| {
        gpu.segment_attention(SegmentAttention { qkv: &qkv, shape, segments }, &mut out)
    };
    for segments in [&[0..2, 3..4][..], &[0..2, 2..5], &[0..2, 2..2, 2..4], &[1..2, 2..4], &[]] {
        let refused = attend(&mut gpu, shape, segments).unwrap_err().to_string();
        assert!(refused.contains("4 rows of attention"), "{segments:?}: {refused}");
    }
    let whole = segments(&[4]);
    for heads in [EncoderHeads { heads: 0, head_dim: 8 }, EncoderHeads { heads: 2, head_dim: 8 }] {
        let refused = attend(&mut gpu, heads, &whole);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{refused:?}");
    }
    let wide = EncoderHeads { heads: 1, head_dim: 130 };
    let x = tensor(&mut gpu, 390, &[0.0; 390]);
    let mut widest = gpu.tensor(1, 130).unwrap();
    let attention = SegmentAttention { qkv: &x, shape: wide, segments: &segments(&[1]) };
    let refused = gpu.segment_attention(attention, &mut widest);
    assert!(matches!(refused, Err(DeviceError::Unsupported(_))), "{refused:?}");
    let angles = tensor(&mut gpu, 8, &[0.0; 3 * 8]);
    let mut rotated = tensor(&mut gpu, 24, &[0.0; 4 * 24]);
    let refused = gpu.rotate_heads(shape, &angles, &mut rotated).unwrap_err().to_string();
    assert!(refused.contains("angles of 3 rows for 4 rows"), "{refused}");
    for (first, count) in [(3, 48), (usize::MAX, 24), (0, 23)] {
        let refused = gpu.add_rows(&mut rotated, first, &vec![0.0; count]).unwrap_err().to_string();
        assert!(refused.contains("for 4 rows of 24"), "{refused}");
    }
    let grid = PixelGrid { pictures: 1, height: 1, width: 3 };
    let mut windows = gpu.tensor(4, 24 * 9).unwrap();
    let refused = gpu.gather_convolution(grid, &rotated, &mut windows).unwrap_err().to_string();
    assert!(refused.contains("4 rows for the pixels"), "{refused}");
    let mut joined = gpu.tensor(4, 36).unwrap();
    let refused = gpu.join_rows(&rotated, &mut joined).unwrap_err().to_string();
    assert!(refused.contains("rows of 24 joined to rows of 36"), "{refused}");
}
