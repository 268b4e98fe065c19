//! Tests two steps in flight: a row continues with the token that the GPU sampled last for its slot.

use tutti_kernels::{
    Argmax, Dense, Device, DeviceError, Embed, HostMatrix, KvShape, KvType, PageId, PlanesShape, Quantize,
    SampleRow, Sampler, SamplingParams, StepResults, WeightType,
};

use crate::support::{Random, Share, begin, bytes, cuda, values};

const VOCABULARY: usize = 40;
const WIDTH: usize = 16;

fn planes_shape() -> PlanesShape {
    let kv = KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        page_tokens: 16,
        pages: 5,
        dtype: KvType::Full(WeightType::F32),
    };
    PlanesShape { kv: Some(kv), slots: 4, ..PlanesShape::default() }
}

/// Two rows of one token each, in slots 1 and 3.
fn shares(start: usize, continues: bool) -> [Share; 2] {
    [(1, 1), (3, 2)].map(|(slot, page)| Share {
        tokens: 1,
        start,
        pages: vec![PageId(page)],
        slot,
        continues,
    })
}

#[test]
fn a_row_that_continues_begins_with_the_token_that_its_slot_sampled_last() {
    let Some(mut gpu) = cuda("flight") else { return };
    assert_eq!(gpu.limits().steps_in_flight, 2);
    let mut planes = gpu.planes(&planes_shape()).unwrap();
    let table = Random::new(11).normals(VOCABULARY * WIDTH, 1.0);
    let source = bytes(WeightType::F32, &table);
    let source = HostMatrix::new(&source, WeightType::F32, VOCABULARY, WIDTH);
    let weight = gpu.tied_matrix(&[source], Quantize::None).unwrap();
    let embed = || Embed { table: &weight, shard: None };
    let mut x = gpu.tensor(2, WIDTH).unwrap();
    let mut logits = gpu.tensor(2, VOCABULARY).unwrap();
    begin(&mut gpu, &mut planes, &shares(0, false), &[5, 17], &[0, 1], &[]).unwrap();
    gpu.embed(embed(), &mut x).unwrap();
    gpu.keep_logit_rows(&mut x).unwrap();
    gpu.argmax(Argmax { x: &x, norm: None, weight: &weight, logits: &mut logits, allowed: &[] }).unwrap();
    let mut first = gpu.end_step().unwrap();

    begin(&mut gpu, &mut planes, &shares(1, true), &[0, 0], &[0, 1], &[]).unwrap();
    gpu.embed(embed(), &mut x).unwrap();
    let mut second = gpu.end_step().unwrap();

    let mut results = StepResults::default();
    assert!(gpu.collect(&mut first, None, &mut results).unwrap());
    let tokens: Vec<usize> =
        results.sampled.iter().map(|sampled| sampled.as_ref().unwrap().token as usize).collect();
    // The dot product of a row of the table with itself is larger than with any other row.
    let norm = |token: usize| table[token * WIDTH..][..WIDTH].iter().map(|x| x * x).sum::<f32>();
    let dot = |a: usize, b: usize| {
        table[a * WIDTH..][..WIDTH].iter().zip(&table[b * WIDTH..]).map(|(x, y)| x * y).sum::<f32>()
    };
    let best = |of: usize| (0..VOCABULARY).max_by(|&a, &b| dot(of, a).total_cmp(&dot(of, b))).unwrap();
    assert!(norm(5) > 0.0);
    assert_eq!(tokens, [best(5), best(17)]);
    let embedded = values(&mut gpu, &x);
    for (row, token) in embedded.chunks(WIDTH).zip(&tokens) {
        assert_eq!(row, &table[token * WIDTH..][..WIDTH]);
    }
    assert!(gpu.collect(&mut second, None, &mut results).unwrap());
}

/// A step that is enqueued while another is in flight counts, in its penalties, the token that the earlier step
/// samples. The host does not know this token yet.
#[test]
fn a_penalty_counts_the_token_of_the_step_in_flight() {
    let Some(mut gpu) = cuda("penalties in flight") else { return };
    let mut planes = gpu.planes(&planes_shape()).unwrap();
    let mut row = [0.0f32; VOCABULARY];
    (row[9], row[4]) = (2.0, 1.9);
    let logits = row.repeat(2);
    let mut uploaded = gpu.tensor(2, VOCABULARY).unwrap();
    let params = SamplingParams { presence_penalty: 0.5, ..SamplingParams::GREEDY };
    let sample = SampleRow {
        params: &params,
        prompt: &[],
        output: &[],
        forbidden: &[],
        allowed: None,
        position: 1,
        logprobs: None,
    };
    let mut steps = Vec::new();
    for continues in [false, true] {
        begin(&mut gpu, &mut planes, &shares(usize::from(continues), continues), &[], &[0, 1], &[]).unwrap();
        gpu.upload(&logits, &mut uploaded).unwrap();
        gpu.sample(&uploaded, &[(0, sample), (1, sample)]).unwrap();
        steps.push(gpu.end_step().unwrap());
    }
    let mut results = StepResults::default();
    for mut step in steps {
        assert!(gpu.collect(&mut step, None, &mut results).unwrap());
    }
    let tokens: Vec<u32> = results.sampled.iter().map(|sampled| sampled.as_ref().unwrap().token).collect();
    assert_eq!(tokens, [9, 9, 4, 4]);
}

#[test]
fn refused_steps_leave_the_device_as_it_was() {
    let Some(mut gpu) = cuda("misuse") else { return };
    let mut planes = gpu.planes(&planes_shape()).unwrap();
    let share = |share: Share| [Share { tokens: 1, pages: vec![PageId(1)], ..share }];
    let cases = [
        ("a page beyond the pool", share(Share::default()).map(|s| Share { pages: vec![PageId(5)], ..s })),
        ("a short table", share(Share::default()).map(|s| Share { start: 16, ..s })),
        ("a slot that is not kept", share(Share { slot: 4, continues: true, ..Share::default() })),
        ("the null slot continues", share(Share { continues: true, ..Share::default() })),
    ];
    for (what, shares) in cases {
        let refused = begin(&mut gpu, &mut planes, &shares, &[], &[], &[]);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{what}: {refused:?}");
    }
    let same = shares(0, false).map(|share| Share { pages: vec![PageId(1)], ..share });
    assert!(begin(&mut gpu, &mut planes, &same, &[], &[], &[]).is_err(), "two rows write one page");
    begin(&mut gpu, &mut planes, &shares(0, false), &[], &[], &[]).unwrap();
    let mut done = gpu.end_step().unwrap();
    assert!(gpu.collect(&mut done, None, &mut StepResults::default()).unwrap());
}
