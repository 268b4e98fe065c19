//! Tests rotation, the storing of keys and values in pages, and attention against the CPU device.

use tutti_kernels::{
    Attention, AttentionShape, Device, DeviceError, HeadNorms, KvScales, KvShape, KvType, PageId,
    PagedAttention, PlanesShape, RopeFrequencies, Rotary, RotateAndStore, RowInputs, SlotId, StepInputs,
    WeightType,
};

use crate::support::{Case, Families, Random, Share, begin, bits, compare, cuda, tensor, values};

/// Requests that are computed in chunks, with pages of two layers.
#[derive(Clone, Debug)]
pub struct Chunks {
    pub shape: AttentionShape,
    pub page_tokens: usize,
    pub dtype: KvType,
    /// Scales of both layers in fp8.
    pub scales: Vec<KvScales>,
    pub rotated: usize,
    pub norms: bool,
    /// Total length of each request.
    pub lengths: Vec<usize>,
    /// The number of tokens of a request in each step, as long as the request has tokens left.
    pub chunks: Vec<usize>,
}

impl Chunks {
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = (head_dim as f32).powf(-0.5);
        let shape = AttentionShape { heads, kv_heads, head_dim, scale, window: None };
        let lengths = vec![1, 15, 16, 17, 33, 70];
        let (page_tokens, dtype) = (16, KvType::Full(WeightType::F32));
        let scales = Vec::new();
        Self {
            shape,
            page_tokens,
            dtype,
            scales,
            rotated: head_dim,
            norms: true,
            lengths,
            chunks: vec![13, 1, 40],
        }
    }

    /// Runs all requests, each step by step. Returns the results of each request's tokens in order.
    pub fn results<D: Families>(&self, device: &mut D) -> Vec<Vec<f32>> {
        let Self { shape, page_tokens, rotated, .. } = *self;
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let width = (heads + 2 * kv_heads) * head_dim;
        let pages_of = |length: usize| length.div_ceil(page_tokens);
        let pages = 1 + self.lengths.iter().map(|&length| pages_of(length)).sum::<usize>();
        let kv = KvShape { layers: 2, kv_heads, head_dim, page_tokens, pages, dtype: self.dtype };
        let kv_scales = self.scales.clone();
        let shape_of_planes = PlanesShape { kv: Some(kv), kv_scales, ..PlanesShape::default() };
        let mut planes = device.planes(&shape_of_planes).unwrap();
        // Each byte is 0xff, so all memory that is not written later is NaN in all types.
        let all: Vec<PageId> = (0..pages as u32).map(PageId).collect();
        device.write_pages(&mut planes, &all, &vec![0xff; kv.page_bytes() * pages]).unwrap();
        // The pages are shuffled, so that no request has them in ascending order.
        let mut free: Vec<PageId> = (1..pages as u32).map(PageId).collect();
        let mut random = Random::new(5);
        (0..free.len()).for_each(|i| free.swap(i, random.below(pages - 1)));
        let tables: Vec<Vec<PageId>> =
            self.lengths.iter().map(|&length| free.split_off(free.len() - pages_of(length))).collect();
        let inputs: Vec<Vec<f32>> = self
            .lengths
            .iter()
            .map(|&length| Random::new(length as u64).normals(length * width, 1.0))
            .collect();
        let weights = [1, 2].map(|seed| Random::new(seed).normals(head_dim, 1.0));
        let weights = weights.map(|weight| device.vector(&weight).unwrap());
        let inverse = (0..rotated / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / rotated as f32)).collect();
        let rope = RopeFrequencies { inverse, scale: 1.1, axes: vec![] };
        let (mut done, mut out) = (vec![0; self.lengths.len()], vec![Vec::new(); self.lengths.len()]);
        for chunk in self.chunks.iter().cycle() {
            let live: Vec<usize> = (0..done.len()).filter(|&i| done[i] < self.lengths[i]).collect();
            if live.is_empty() {
                return out;
            }
            let (mut shares, mut qkv) = (Vec::new(), Vec::new());
            for &request in &live {
                let (start, left) = (done[request], self.lengths[request] - done[request]);
                let tokens = left.min(*chunk);
                qkv.extend_from_slice(&inputs[request][start * width..(start + tokens) * width]);
                shares.push(Share { tokens, start, pages: tables[request].clone(), ..Share::default() });
            }
            begin(device, &mut planes, &shares, &[], &[], &[]).unwrap();
            let tokens = qkv.len() / width;
            let mut angles = device.tensor(tokens, rotated).unwrap();
            device.rope_angles(&rope, &mut angles).unwrap();
            let mut attended = device.tensor(tokens, heads * head_dim).unwrap();
            for layer in [1, 0] {
                let mut qkv = tensor(device, width, &qkv);
                let norms = HeadNorms { q: &weights[0], k: &weights[1], eps: 1e-6 };
                let operands = RotateAndStore {
                    qkv: &mut qkv,
                    shape,
                    norms: self.norms.then_some(norms),
                    rotary: Rotary { angles: &angles },
                    planes: &mut planes,
                    layer,
                };
                device.rotate_and_store(operands).unwrap();
                let attention = Attention { qkv: &qkv, shape, planes: &planes, layer };
                device.attention(attention, &mut attended).unwrap();
            }
            let got = values(device, &attended);
            let mut rows = got.chunks(heads * head_dim);
            for (&request, share) in live.iter().zip(&shares) {
                rows.by_ref().take(share.tokens).for_each(|row| out[request].extend_from_slice(row));
                done[request] += share.tokens;
            }
        }
        out
    }
}

impl Case for Chunks {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        self.results(device).concat()
    }
}

#[test]
fn attention_of_ragged_batches_is_that_of_the_cpu() {
    let Some(mut gpu) = cuda("attention") else { return };
    let windows = |window| {
        let mut case = Chunks::new(4, 2, 32);
        case.shape.window = Some(window);
        case
    };
    let cases = [
        Chunks::new(4, 2, 32),
        Chunks::new(1, 1, 16),
        Chunks::new(6, 1, 48),
        Chunks::new(2, 2, 128),
        Chunks { rotated: 8, norms: false, ..Chunks::new(3, 3, 64) },
        Chunks { page_tokens: 32, ..Chunks::new(8, 2, 64) },
        // The head size of released Qwen3.5 models, which is the largest supported size.
        Chunks { rotated: 64, lengths: vec![37, 5], ..Chunks::new(4, 1, 256) },
        // Chunks on both sides of the end of a split of 512 keys.
        Chunks { lengths: vec![530, 3], chunks: vec![509, 1], ..Chunks::new(2, 1, 16) },
        windows(1),
        windows(7),
        windows(32),
        windows(33),
    ];
    for case in cases {
        compare(&mut gpu, &format!("{case:?}"), &case, 2e-5);
    }
}

#[test]
fn attention_over_keys_and_values_of_two_bytes_is_that_of_the_cpu() {
    let Some(mut gpu) = cuda("attention in two bytes") else { return };
    for (dtype, tolerance) in [(WeightType::F16, 2e-3), (WeightType::Bf16, 2e-2)] {
        // The kernels on tensor cores do not support these heads.
        let large = Chunks { rotated: 64, lengths: vec![37, 5], ..Chunks::new(4, 1, 256) };
        for case in [Chunks::new(4, 2, 48), large] {
            let case = Chunks { dtype: KvType::Full(dtype), ..case };
            compare(&mut gpu, &format!("{case:?}"), &case, tolerance);
        }
    }
}

/// Scales of keys and values of both layers.
pub fn scales() -> Vec<KvScales> {
    vec![KvScales { key: 0.37, value: 3.1 }, KvScales { key: 0.011, value: 0.5 }]
}

#[test]
fn attention_over_keys_and_values_in_fp8_is_that_of_the_cpu() {
    let Some(mut gpu) = cuda("attention in fp8") else { return };
    let large = Chunks { rotated: 64, lengths: vec![37, 5], ..Chunks::new(4, 1, 256) };
    let long = Chunks { lengths: vec![530, 3], chunks: vec![509, 1], ..Chunks::new(2, 1, 16) };
    let mut window = Chunks::new(4, 2, 32);
    window.shape.window = Some(7);
    for case in [Chunks::new(4, 2, 32), Chunks::new(6, 1, 48), large, long, window] {
        for scales in [Vec::new(), scales()] {
            let case = Chunks { dtype: KvType::Fp8(WeightType::F32), scales, ..case.clone() };
            compare(&mut gpu, &format!("{case:?}"), &case, 2e-5);
        }
    }
}

#[test]
fn scales_that_do_not_fit_are_refused() {
    let Some(mut gpu) = cuda("scales of planes") else { return };
    let (layers, kv_heads, head_dim, page_tokens, pages) = (3, 1, 16, 16, 2);
    for (dtype, layers) in [(KvType::Fp8(WeightType::Bf16), layers), (KvType::Full(WeightType::Bf16), 2)] {
        let kv = KvShape { layers, kv_heads, head_dim, page_tokens, pages, dtype };
        let shape = PlanesShape { kv: Some(kv), kv_scales: scales(), ..PlanesShape::default() };
        let refused = gpu.planes(&shape).map(|_| ());
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{refused:?}");
    }
}

/// No bit of a request's results depends on its chunks or its neighbours.
#[test]
fn chunks_and_neighbours_change_no_bit() {
    let Some(mut gpu) = cuda("chunks") else { return };
    let case = Chunks { lengths: vec![70, 17, 530], chunks: vec![600], ..Chunks::new(4, 2, 16) };
    let whole = case.results(&mut gpu);
    for chunks in [vec![1, 16, 100], vec![33], vec![512, 1]] {
        for (length, want) in case.lengths.iter().zip(&whole) {
            let alone = Chunks { lengths: vec![*length], chunks: chunks.clone(), ..case.clone() };
            assert_eq!(bits(&alone.results(&mut gpu)[0]), bits(want), "{length} in {chunks:?}");
        }
    }
}

/// Stores the keys and values of a step in layer 0, without a rotation.
pub fn store<D: Families>(
    device: &mut D,
    qkv: &mut D::Tensor,
    shape: AttentionShape,
    planes: &mut D::Planes,
) {
    let ([tokens, _], head_dim) = (device.tensor_shape(qkv), shape.head_dim);
    let rope = RopeFrequencies { inverse: vec![0.0; head_dim / 2], scale: 1.0, axes: vec![] };
    let mut angles = device.tensor(tokens, head_dim).unwrap();
    device.rope_angles(&rope, &mut angles).unwrap();
    let rotary = Rotary { angles: &angles };
    device.rotate_and_store(RotateAndStore { qkv, shape, norms: None, rotary, planes, layer: 0 }).unwrap();
}

/// Padding rows have the null page. Nothing is stored in the null page or read from it, and the rows' output is zeros.
#[test]
fn padding_rows_store_nothing_and_attend_to_nothing() {
    let Some(mut gpu) = cuda("padding") else { return };
    let kv = KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        page_tokens: 16,
        pages: 2,
        dtype: KvType::Full(WeightType::F32),
    };
    let mut planes = gpu.planes(&PlanesShape { kv: Some(kv), ..PlanesShape::default() }).unwrap();
    let garbage = f32::NAN.to_le_bytes().repeat(kv.page_bytes() / 4);
    gpu.write_pages(&mut planes, &[PageId(0)], &garbage).unwrap();
    let pages = |page| vec![PageId(page)];
    let shares = [1, 0, 0].map(|page| Share { tokens: 2, pages: pages(page), ..Share::default() });
    begin(&mut gpu, &mut planes, &shares, &[], &[], &[]).unwrap();
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 16, scale: 1.0, window: None };
    let mut qkv = tensor(&mut gpu, 48, &Random::new(2).normals(6 * 48, 1.0));
    store(&mut gpu, &mut qkv, shape, &mut planes);
    let mut out = gpu.tensor(6, 16).unwrap();
    gpu.attention(Attention { qkv: &qkv, shape, planes: &planes, layer: 0 }, &mut out).unwrap();
    let out = values(&mut gpu, &out);
    assert!(out[..32].iter().all(|x| *x != 0.0) && out[32..].iter().all(|x| *x == 0.0), "{out:?}");
    let mut null = Vec::new();
    gpu.read_pages(&planes, &[PageId(0)], &mut null).unwrap();
    assert_eq!(null, garbage);
}

/// Angles of three axes at very large positions.
struct Angles(Vec<u8>);

impl Case for Angles {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let mut planes = device.planes(&PlanesShape::default()).unwrap();
        let axis = |step: usize| (0..40).map(|i| (131_000 * (i % 2) + step * i) as f32).collect::<Vec<f32>>();
        let axes = [axis(1), axis(3), axis(0)];
        let row = RowInputs {
            first_token: 0,
            tokens: 40,
            start: 0,
            slot: SlotId::NULL,
            continues: false,
            block_table: &[],
        };
        let positions = [&axes[0][..], &axes[1], &axes[2]];
        let (token_ids, rows) = ([0; 40], [row]);
        let inputs = StepInputs {
            token_ids: &token_ids,
            positions,
            rows: &rows,
            copies: &[],
            logit_rows: &[],
            shape: None,
        };
        device.begin_step(&inputs, &mut planes).unwrap();
        let inverse: Vec<f32> = (0..6).map(|i| 1e6_f32.powf(-(i as f32) / 6.0)).collect();
        let mut out = device.tensor(40, 12).unwrap();
        let rope = RopeFrequencies { inverse, scale: 1.25, axes: self.0.clone() };
        device.rope_angles(&rope, &mut out).unwrap();
        values(device, &out)
    }
}

#[test]
fn angles_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("angles") else { return };
    for axes in [vec![], vec![0, 0, 1, 1, 2, 2], vec![2, 1, 0, 2, 1, 0]] {
        compare(&mut gpu, &format!("{axes:?}"), &Angles(axes), 2e-7);
    }
}

#[test]
fn pages_that_were_read_can_be_written_elsewhere() {
    let Some(mut gpu) = cuda("pages") else { return };
    let shape = KvShape {
        layers: 3,
        kv_heads: 2,
        head_dim: 16,
        page_tokens: 16,
        pages: 6,
        dtype: KvType::Full(WeightType::F16),
    };
    let mut planes = gpu.planes(&PlanesShape { kv: Some(shape), ..PlanesShape::default() }).unwrap();
    let bytes: Vec<u8> = (0..2 * shape.page_bytes()).map(|i| (i % 251) as u8).collect();
    gpu.write_pages(&mut planes, &[PageId(4), PageId(1)], &bytes).unwrap();
    let mut back = vec![7];
    gpu.read_pages(&planes, &[PageId(1), PageId(4), PageId(2)], &mut back).unwrap();
    let (first, second) = bytes.split_at(shape.page_bytes());
    assert_eq!(back[1..], [second, first, &vec![0; shape.page_bytes()]].concat());
    assert!(gpu.read_pages(&planes, &[PageId(6)], &mut back).is_err());
    assert!(gpu.write_pages(&mut planes, &[PageId(1)], &bytes).is_err());
}
