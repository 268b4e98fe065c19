//! Tests rotation, the storing of keys and values in pages, and attention against double precision. Also tests that
//! chunks, batch-mates and threads change no bit.

use tutti_kernels::cpu::{CpuDevice, Isa, Planes};
use tutti_kernels::{
    Attention, AttentionShape, Device, HeadNorms, KvScales, KvShape, KvType, PageId, PagedAttention,
    PlanesShape, RopeFrequencies, Rotary, RotateAndStore, WeightType, e4m3,
};

use crate::support::{Random, Share, assert_near, bits, devices, stored, tensor, try_begin};

const F32: KvType = KvType::Full(WeightType::F32);
const F16: KvType = KvType::Full(WeightType::F16);
const BF16: KvType = KvType::Full(WeightType::Bf16);
/// Fp8 of models in f32 and in bfloat16.
const FP8: [KvType; 2] = [KvType::Fp8(WeightType::F32), KvType::Fp8(WeightType::Bf16)];

/// The parameters of an attention layer and its pages.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: AttentionShape,
    page_tokens: usize,
    dtype: KvType,
    /// The scales of both layers, if keys and values are in fp8.
    scales: KvScales,
    /// True if q and k have rotation and head norms, as in a real layer. If false, they have neither.
    real: bool,
    /// Number of elements of a head that are rotated.
    rotated: usize,
}

impl Case {
    fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = (head_dim as f32).powf(-0.5);
        let shape = AttentionShape { heads, kv_heads, head_dim, scale, window: None };
        let (dtype, scales) = (F32, KvScales::ONE);
        Self { shape, page_tokens: 16, dtype, scales, real: false, rotated: head_dim }
    }

    fn width(&self) -> usize {
        (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
    }

    fn rope(&self) -> RopeFrequencies {
        let half = self.rotated / 2;
        let power = |i: usize| if self.real { 1e4_f32.powf(-(i as f32) / half as f32) } else { 0.0 };
        RopeFrequencies { inverse: (0..half).map(power).collect(), scale: 1.0, axes: vec![] }
    }

    fn norm_weights(&self) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::new(77);
        (random.normals(self.shape.head_dim, 1.0), random.normals(self.shape.head_dim, 1.0))
    }
}

/// Scales that are no powers of two.
const SCALES: KvScales = KvScales { key: 0.013, value: 0.7 };

/// A request: the fused rows of its tokens, and its pages.
struct Request {
    qkv: Vec<f32>,
    pages: Vec<PageId>,
    done: usize,
    /// Results so far, `[done, heads * head_dim]`.
    out: Vec<f32>,
}

/// A device with a pool whose pages are filled with NaN, and some requests.
struct World<'a> {
    case: Case,
    device: &'a mut CpuDevice,
    planes: Planes,
    requests: Vec<Request>,
}

/// The fused rows of a request, which depend only on its length.
fn numbers(case: &Case, length: usize) -> Vec<f32> {
    Random::new(length as u64).normals(length * case.width(), 1.0)
}

/// Makes requests of these lengths. The numbers of a request depend only on its length.
fn world<'a>(case: Case, device: &'a mut CpuDevice, lengths: &[usize], shuffle: u64) -> World<'a> {
    let pages_of = |length: usize| length.div_ceil(case.page_tokens);
    let count: usize = lengths.iter().map(|&length| pages_of(length)).sum();
    let shape = KvShape {
        layers: 2,
        kv_heads: case.shape.kv_heads,
        head_dim: case.shape.head_dim,
        page_tokens: case.page_tokens,
        pages: count + 1,
        dtype: case.dtype,
    };
    let kv_scales = if case.scales == KvScales::ONE { vec![] } else { vec![case.scales; shape.layers] };
    let planes = PlanesShape { kv: Some(shape), kv_scales, ..PlanesShape::default() };
    let planes = device.planes(&planes).unwrap();
    let mut pages: Vec<PageId> = (1..=count as u32).map(PageId).collect();
    let mut random = Random::new(shuffle);
    (0..count).for_each(|i| pages.swap(i, random.below(count)));
    let poison = Request {
        qkv: vec![f32::NAN; count * case.page_tokens * case.width()],
        pages: pages.clone(),
        done: 0,
        out: Vec::new(),
    };
    let mut world = World { case, device, planes, requests: vec![poison] };
    // Fills all pages with NaN, in both layers.
    world.step(&[(0, count * case.page_tokens)]);
    world.requests.clear();
    for &length in lengths {
        let own = pages.split_off(pages.len() - pages_of(length));
        world.requests.push(Request { qkv: numbers(&case, length), pages: own, done: 0, out: Vec::new() });
    }
    world
}

impl World<'_> {
    /// Runs one step, with (request, tokens) for each row.
    fn step(&mut self, rows: &[(usize, usize)]) {
        let Case { shape, .. } = self.case;
        let width = self.case.width();
        let mut shares = Vec::new();
        let mut values = Vec::new();
        for &(index, tokens) in rows {
            let request = &self.requests[index];
            shares.push(Share {
                tokens,
                start: request.done,
                pages: request.pages.clone(),
                ..Share::default()
            });
            values.extend_from_slice(&request.qkv[request.done * width..(request.done + tokens) * width]);
        }
        try_begin(self.device, &mut self.planes, &shares, &[], &[]).unwrap();
        let tokens = values.len() / width;
        let mut angles = self.device.tensor(tokens, self.case.rotated).unwrap();
        self.device.rope_angles(&self.case.rope(), &mut angles).unwrap();
        let (q, k) = self.case.norm_weights();
        let (q, k) = (self.device.vector(&q).unwrap(), self.device.vector(&k).unwrap());
        let mut out = self.device.tensor(tokens, shape.heads * shape.head_dim).unwrap();
        for layer in [1, 0] {
            let mut qkv = tensor(self.device, width, &values);
            let norms = self.case.real.then_some(HeadNorms { q: &q, k: &k, eps: 1e-6 });
            let (rotary, planes) = (Rotary { angles: &angles }, &mut self.planes);
            let operands = RotateAndStore { qkv: &mut qkv, shape, norms, rotary, planes, layer };
            self.device.rotate_and_store(operands).unwrap();
            let attention = Attention { qkv: &qkv, shape, planes: &self.planes, layer };
            self.device.attention(attention, &mut out).unwrap();
        }
        let mut results = out.values();
        for &(index, tokens) in rows {
            let (own, rest) = results.split_at(tokens * shape.heads * shape.head_dim);
            self.requests[index].out.extend_from_slice(own);
            self.requests[index].done += tokens;
            results = rest;
        }
    }

    /// Runs the remaining tokens of one request in chunks of `chunk` tokens, and returns the bits of its results.
    fn finish(&mut self, index: usize, chunk: usize) -> Vec<u32> {
        let length = self.requests[index].qkv.len() / self.case.width();
        while self.requests[index].done < length {
            let tokens = chunk.min(length - self.requests[index].done);
            self.step(&[(index, tokens)]);
        }
        bits(&self.requests[index].out)
    }
}

/// A head's vector after norm and rotation, in double precision.
fn turned(case: &Case, head: &[f32], weight: &[f32], position: usize) -> Vec<f64> {
    let mut x: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
    if !case.real {
        return x;
    }
    let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (square + 1e-6).sqrt();
    x.iter_mut().zip(weight).for_each(|(x, &weight)| *x *= factor * f64::from(weight));
    let half = case.rotated / 2;
    for (i, inverse) in case.rope().inverse.iter().enumerate() {
        let angle = f64::from(position as f32 * inverse);
        let (a, b) = (x[i], x[i + half]);
        x[i] = a * angle.cos() - b * angle.sin();
        x[i + half] = b * angle.cos() + a * angle.sin();
    }
    x
}

/// Reference attention in double precision.
fn reference(case: &Case, qkv: &[f32]) -> Vec<f64> {
    let AttentionShape { heads, kv_heads, head_dim, scale, window } = case.shape;
    let (width, length) = (case.width(), qkv.len() / case.width());
    let (q_weight, k_weight) = case.norm_weights();
    let keep = |x: f64, scale: f32| {
        f64::from(match case.dtype {
            KvType::Full(dtype) => stored(dtype, x as f32),
            KvType::Fp8(_) => e4m3::value(e4m3::nearest(x as f32 / scale)) * scale,
        })
    };
    let part = |token: usize, head: usize| &qkv[token * width + head * head_dim..][..head_dim];
    let mut out = Vec::new();
    for token in 0..length {
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let q = turned(case, part(token, head), &q_weight, token);
            let first = window.map_or(0, |window| (token + 1).saturating_sub(window));
            let scores: Vec<f64> = (first..=token)
                .map(|key| {
                    let k = turned(case, part(key, heads + kv_head), &k_weight, key);
                    q.iter().zip(&k).map(|(q, &k)| q * keep(k, case.scales.key)).sum::<f64>()
                        * f64::from(scale)
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            let mut sums = vec![0.0; head_dim];
            for (key, score) in (first..=token).zip(&scores) {
                let v = part(key, heads + kv_heads + kv_head);
                let weight = (score - largest).exp() / total;
                sums.iter_mut()
                    .zip(v)
                    .for_each(|(sum, &v)| *sum += weight * keep(f64::from(v), case.scales.value));
            }
            out.extend(sums);
        }
    }
    out
}

#[test]
fn attention_is_that_of_double_precision() {
    for (name, mut device) in devices("attention") {
        for (case, length) in [
            (Case::new(4, 2, 32), 150),
            (Case::new(3, 3, 16), 70),
            (Case::new(8, 1, 64), 90),
            (Case { page_tokens: 48, real: true, ..Case::new(4, 2, 128) }, 100),
            (Case { real: true, rotated: 32, ..Case::new(4, 2, 128) }, 70),
            (Case { real: true, rotated: 10, ..Case::new(2, 1, 48) }, 70),
            (Case { dtype: BF16, ..Case::new(4, 2, 32) }, 140),
            (Case { dtype: F16, page_tokens: 64, ..Case::new(2, 1, 48) }, 80),
            (Case { dtype: FP8[0], scales: SCALES, ..Case::new(4, 2, 32) }, 140),
            (Case { dtype: FP8[0], page_tokens: 32, ..Case::new(3, 1, 48) }, 80),
            (Case { dtype: FP8[1], scales: SCALES, ..Case::new(4, 2, 32) }, 140),
            (Case { dtype: FP8[1], real: true, ..Case::new(4, 2, 128) }, 140),
        ] {
            for window in [None, Some(1), Some(5), Some(64), Some(100)] {
                let mut case = case;
                case.shape.window = window;
                let mut world = world(case, &mut device, &[length], 1);
                world.finish(0, length);
                // A key near a rounding boundary of its storage type may be rounded to the other side.
                let tolerance = match case.dtype {
                    KvType::Fp8(_) if case.real => 5e-2,
                    F32 | KvType::Fp8(WeightType::F32) => 3e-6,
                    _ if case.real => 3e-6,
                    _ => 5e-3,
                };
                let want = reference(&case, &world.requests[0].qkv);
                assert_near(&format!("{name} {case:?}"), &world.requests[0].out, &want, tolerance);
            }
        }
    }
}

/// Tests contexts of several ranges of 512 keys, with windows that begin in an earlier range or within a tile of
/// queries.
#[test]
fn long_contexts_are_those_of_double_precision() {
    const LENGTH: usize = 1100;
    for dtype in [F32, BF16, FP8[0], FP8[1]] {
        for window in [None, Some(20), Some(512), Some(700)] {
            let mut case = Case { dtype, ..Case::new(2, 1, 16) };
            case.shape.window = window;
            let want = reference(&case, &numbers(&case, LENGTH));
            let tolerance = if [F32, FP8[0]].contains(&dtype) { 3e-6 } else { 5e-3 };
            for (name, mut device) in devices("long contexts") {
                let mut world = world(case, &mut device, &[LENGTH], 1);
                world.step(&[(0, 1030)]);
                world.finish(0, 7);
                assert_near(&format!("{name} {case:?}"), &world.requests[0].out, &want, tolerance);
            }
        }
    }
}

/// A decode whose ranges run as separate tasks has the same bits with one thread, with two threads, with more threads
/// than ranges, and in a batch with a prefill, where no tile is split.
#[test]
fn threads_and_ranges_change_no_bit() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        for (heads, kv_heads, window, dtype) in
            [(4, 2, None, BF16), (4, 2, None, FP8[1]), (6, 1, Some(900), BF16), (1, 1, Some(30), BF16)]
        {
            let mut case = Case { dtype, ..Case::new(heads, kv_heads, 32) };
            case.shape.window = window;
            let run = |threads: usize, chunk: usize, with_mate: bool| {
                let mut device = CpuDevice::new(threads, isa).unwrap();
                let mut world = world(case, &mut device, &[1620, 3000], 3);
                world.step(&[(0, 500), (1, 1)]);
                world.step(&[(0, 1000)]);
                while world.requests[0].done < 1620 {
                    let tokens = chunk.min(1620 - world.requests[0].done);
                    let mates = [(0, tokens), (1, 300)];
                    world.step(&mates[..if with_mate { 2 } else { 1 }]);
                }
                bits(&world.requests[0].out)
            };
            let want = run(1, 120, false);
            for (threads, chunk, with_mate) in
                [(1, 1, false), (2, 1, false), (7, 1, false), (2, 17, true), (5, 40, false)]
            {
                let got = run(threads, chunk, with_mate);
                assert!(got == want, "{isa}, {threads} threads, {case:?}: chunks of {chunk}");
            }
        }
    }
}

/// Pages before a request's window may have been given to other requests, and may hold NaN.
#[test]
fn what_a_window_has_left_behind_is_never_read() {
    for (name, mut device) in devices("left behind") {
        for (window, dtype) in
            [1, 16, 50, 64, 600].into_iter().flat_map(|window| [(window, BF16), (window, FP8[1])])
        {
            let mut case = Case { dtype, ..Case::new(4, 2, 32) };
            case.shape.window = Some(window);
            let whole = world(case, &mut device, &[800, 16], 1).finish(0, 800);
            for chunk in [1, 30] {
                let mut world = world(case, &mut device, &[800, 16], 1);
                world.step(&[(0, 640)]);
                while world.requests[0].done < 800 {
                    let done = world.requests[0].done;
                    // The second request's page has not been written and holds NaN.
                    let poison = world.requests[1].pages[0];
                    let behind = (done + 1).saturating_sub(window) / case.page_tokens;
                    world.requests[0].pages[..behind].fill(poison);
                    world.step(&[(0, chunk.min(800 - done))]);
                }
                assert!(
                    bits(&world.requests[0].out) == whole,
                    "{name} {dtype}: window {window}, chunks of {chunk}"
                );
            }
        }
    }
}

/// A request has the same bits with any division into chunks and with any pages.
#[test]
fn chunking_changes_no_bit() {
    for (name, mut device) in devices("chunking") {
        for dtype in [F32, BF16, FP8[0], FP8[1]] {
            for window in [None, Some(7), Some(64), Some(130)] {
                for (heads, kv_heads, head_dim) in [(4, 2, 32), (7, 1, 16), (2, 2, 128)] {
                    let mut case = Case { dtype, real: true, ..Case::new(heads, kv_heads, head_dim) };
                    case.shape.window = window;
                    let whole = world(case, &mut device, &[213], 1).finish(0, 213);
                    assert!(!whole.iter().any(|&x| f32::from_bits(x).is_nan()), "{name} {case:?}");
                    for chunk in [1, 3, 16, 64, 100, 212] {
                        let chunked = world(case, &mut device, &[213], chunk as u64).finish(0, chunk);
                        assert!(chunked == whole, "{name} {case:?}: chunks of {chunk}");
                    }
                    case.page_tokens = 80;
                    let paged = world(case, &mut device, &[213], 9).finish(0, 50);
                    assert!(paged == whole, "{name} {case:?}: other pages");
                }
            }
        }
    }
}

/// A request has the same bits with any batch-mates. This also shows that no request writes to another request's pages,
/// because later results would differ.
#[test]
fn batch_mates_change_no_bit() {
    const LENGTHS: [usize; 6] = [1, 17, 64, 65, 130, 200];
    for (name, mut device) in devices("batch-mates") {
        let case = Case { real: true, ..Case::new(6, 2, 32) };
        let alone: Vec<Vec<u32>> =
            LENGTHS.iter().map(|&length| world(case, &mut device, &[length], 1).finish(0, length)).collect();
        for seed in 0..6 {
            let mut random = Random::new(seed);
            let mut world = world(case, &mut device, &LENGTHS, seed);
            loop {
                // A random mix of decodes, chunks and requests that skip a step, in random order.
                let mut rows = Vec::new();
                for (index, &length) in LENGTHS.iter().enumerate() {
                    let left = length - world.requests[index].done;
                    if left > 0 && random.below(4) > 0 {
                        let most = [1, 1, 20, 90][random.below(4)];
                        rows.insert(random.below(rows.len() + 1), (index, left.min(1 + random.below(most))));
                    }
                }
                if !rows.is_empty() {
                    world.step(&rows);
                }
                if LENGTHS.iter().zip(&world.requests).all(|(&length, request)| request.done == length) {
                    break;
                }
            }
            for (index, request) in world.requests.iter().enumerate() {
                assert!(bits(&request.out) == alone[index], "{name}: request {index}, seed {seed}");
            }
        }
    }
}

/// Pages in fp8 give the bits of pages in bfloat16 that hold the same numbers: keys and values are rounded to e4m3,
/// ties to even, after a division by the scale.
#[test]
fn fp8_pages_hold_numbers_that_are_rounded_to_e4m3() {
    for (name, mut device) in devices("numbers of fp8") {
        for scales in [KvScales::ONE, KvScales { key: 1.0 / 512.0, value: 1.0 / 256.0 }] {
            let case = Case { dtype: FP8[1], scales, ..Case::new(6, 2, 64) };
            let mut fp8 = world(case, &mut device, &[300], 1);
            // With small scales, some numbers are beyond the largest e4m3. In both cases, some are subnormal.
            let spread = |(i, x): (usize, &mut f32)| *x *= [1.0, 1e-2, 1e-4, 1.0][i % 4];
            fp8.requests[0].qkv.chunks_mut(case.width()).for_each(|token| {
                token[6 * 64..].iter_mut().enumerate().for_each(spread);
            });
            let mut rounded = fp8.requests[0].qkv.clone();
            let got = fp8.finish(0, 40);
            for token in rounded.chunks_mut(case.width()) {
                let (keys, values) = token[6 * 64..].split_at_mut(2 * 64);
                for (numbers, scale) in [(keys, scales.key), (values, scales.value)] {
                    for x in numbers {
                        *x = e4m3::value(e4m3::nearest(*x / scale)) * scale;
                    }
                }
            }
            let case = Case { dtype: BF16, scales: KvScales::ONE, ..case };
            let mut bf16 = world(case, &mut device, &[300], 1);
            bf16.requests[0].qkv = rounded;
            assert!(got == bf16.finish(0, 40), "{name} {scales:?}");
            assert!(!got.iter().any(|&bits| f32::from_bits(bits).is_nan()), "{name} {scales:?}");
        }
    }
}

/// A NaN in fp8 stays one, so that the row's logits are refused.
#[test]
fn a_nan_in_fp8_reaches_the_result() {
    for (name, mut device) in devices("NaN in fp8") {
        let case = Case { dtype: FP8[1], ..Case::new(2, 1, 32) };
        let mut world = world(case, &mut device, &[20], 1);
        let width = case.width();
        world.requests[0].qkv[7 * width + 3 * 32] = f32::NAN;
        world.step(&[(0, 20)]);
        let nan: Vec<bool> = world.requests[0].out.chunks(2 * 32).map(|token| token[0].is_nan()).collect();
        assert!(nan.iter().enumerate().all(|(token, nan)| *nan == (token >= 7)), "{name}: {nan:?}");
    }
}

/// All rows of padding share the null page. They change no other row's results, and nothing is written to the null
/// page.
#[test]
fn padding_touches_nothing() {
    for (name, mut device) in devices("padding") {
        let case = Case::new(4, 2, 32);
        let alone = world(case, &mut device, &[40], 1).finish(0, 40);
        let mut world = world(case, &mut device, &[40, 41, 42], 1);
        for padded in [1, 2] {
            world.requests[padded].pages.fill(PageId::NULL);
        }
        for _ in 0..20 {
            world.step(&[(1, 1), (0, 2), (2, 2)]);
        }
        assert!(bits(&world.requests[0].out) == alone, "{name}");
        // Nothing was written to the null page: padded rows read the pool's initial contents.
        assert!(world.requests[1].out.iter().chain(&world.requests[2].out).all(|&x| x == 0.0), "{name}");
    }
}
