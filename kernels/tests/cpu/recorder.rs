//! Tests that a recorder gives the same bits as its device, that it records every operation, and that an observer can
//! refuse an operation.

use std::sync::{Arc, Mutex};

use tutti_kernels::{
    Argmax, Attention, AttentionShape, Collectives, Dense, Device, DeviceError, Embed, HostMatrix, KvShape,
    KvType, Linear, Norm, Observer, Operation, PageId, PagedAttention, PlanesShape, Quantize, Recorder,
    RopeFrequencies, Rotary, RotateAndStore, RowInputs, SampleRow, Sampler, SamplingParams, SlotId,
    StepInputs, StepResults, WeightType,
    cpu::{CpuDevice, Isa},
};

use crate::support::{Random, bytes};

type Log = Arc<Mutex<Vec<Operation>>>;

/// An observer that keeps records, and refuses one operation.
struct Logger {
    log: Log,
    refused: Option<&'static str>,
}

impl Observer for Logger {
    fn observe<T>(
        &mut self,
        operation: &Operation,
        run: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        self.log.lock().unwrap().push(*operation);
        match self.refused == Some(operation.name) {
            true => Err(DeviceError::Misuse("refused by the observer".into())),
            false => run(),
        }
    }
}

const SHAPE: AttentionShape =
    AttentionShape { heads: 2, kv_heads: 1, head_dim: 16, scale: 0.25, window: None };
const WIDTH: usize = 20;
const VOCABULARY: usize = 37;

/// Runs a small layer over two rows, of 3 tokens and of 1 token, and returns its hidden states and its results.
fn layer<D: Dense + PagedAttention + Collectives + Sampler>(
    device: &mut D,
) -> Result<(Vec<f32>, StepResults), DeviceError> {
    let mut random = Random::new(3);
    let kv = KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        page_tokens: 16,
        pages: 3,
        dtype: KvType::Full(WeightType::Bf16),
    };
    let mut planes = device.planes(&PlanesShape {
        kv: Some(kv),
        slot_bytes: vec![8],
        slots: 3,
        ..PlanesShape::default()
    })?;
    let mut matrix = |device: &mut D, rows: usize, columns: usize| {
        let values = bytes(WeightType::F32, &random.normals(rows * columns, 0.3));
        let source = tutti_kernels::HostMatrix::new(&values, WeightType::F32, rows, columns);
        device.matrix(&[source], tutti_kernels::Quantize::None)
    };
    let (table, qkv_weight) = (matrix(device, VOCABULARY, WIDTH)?, matrix(device, 64, WIDTH)?);
    let output = matrix(device, WIDTH, 32)?;
    let norm = device.vector(&[1.5; WIDTH])?;
    let (mut hidden, mut qkv) = (device.tensor(4, WIDTH)?, device.tensor(4, 64)?);
    let (mut angles, mut attended) = (device.tensor(4, 16)?, device.tensor(4, 32)?);
    let mut logits = device.tensor(4, VOCABULARY)?;

    let row = |first_token, tokens, start, slot, block_table| RowInputs {
        first_token,
        tokens,
        start,
        slot: SlotId(slot),
        continues: false,
        block_table,
    };
    let rows = [row(0, 3, 2, 1, &[PageId(1)]), row(3, 1, 0, 2, &[PageId(2)])];
    let positions = [&[2.0, 3.0, 4.0, 0.0][..]; 3];
    let inputs = StepInputs {
        token_ids: &[1, 2, 3, 4],
        positions,
        rows: &rows,
        copies: &[],
        logit_rows: &[2, 3],
        shape: None,
    };
    device.write_pages(&mut planes, &[PageId(1)], &[0; 16 * 2 * 16 * 2])?;
    device.begin_step(&inputs, &mut planes)?;
    device.embed(Embed { table: &table, shard: None }, &mut hidden)?;
    let rope = RopeFrequencies { inverse: vec![0.5; 8], scale: 1.0, axes: vec![] };
    device.rope_angles(&rope, &mut angles)?;
    let norms = Some(Norm { weight: &norm, eps: 1e-6 });
    device.linear(Linear { x: &hidden, norm: norms, weight: &qkv_weight, bias: None }, &mut qkv)?;
    device.rotate_and_store(RotateAndStore {
        qkv: &mut qkv,
        shape: SHAPE,
        norms: None,
        rotary: Rotary { angles: &angles },
        planes: &mut planes,
        layer: 0,
    })?;
    device.attention(Attention { qkv: &qkv, shape: SHAPE, planes: &planes, layer: 0 }, &mut attended)?;
    device.keep_logit_rows(&mut attended)?;
    device.keep_logit_rows(&mut hidden)?;
    device.linear_add(Linear::plain(&attended, &output), &mut hidden)?;
    device.all_reduce(&mut hidden)?;
    let norm = Some(Norm { weight: &norm, eps: 1e-6 });
    device.argmax(Argmax { x: &hidden, norm, weight: &table, logits: &mut logits, allowed: &[] })?;
    let norm = None;
    device.linear(Linear { x: &hidden, norm, weight: &table, bias: None }, &mut logits)?;
    let params = SamplingParams { temperature: 1.0, seed: 1, ..SamplingParams::GREEDY };
    let row = SampleRow {
        params: &params,
        prompt: &[],
        output: &[],
        forbidden: &[],
        allowed: None,
        position: 0,
        logprobs: Some(3),
    };
    device.sample(&logits, &[(1, row)])?;
    let (mut done, mut results, mut values) = (device.end_step()?, StepResults::default(), Vec::new());
    assert!(device.collect(&mut done, None, &mut results)?);
    device.download(&hidden, &mut values)?;
    Ok((values, results))
}

fn recorder(refused: Option<&'static str>) -> (Recorder<CpuDevice, Logger>, Log) {
    let log = Log::default();
    let device = CpuDevice::new(2, Isa::detect()).unwrap();
    (Recorder::new(device, Logger { log: log.clone(), refused }), log)
}

#[test]
fn every_operation_is_recorded_and_no_bit_changes() {
    let (plain, plain_results) = layer(&mut CpuDevice::new(2, Isa::detect()).unwrap()).unwrap();
    let (mut device, log) = recorder(None);
    let (values, results) = layer(&mut device).unwrap();
    assert_eq!(values, plain);
    assert_eq!((results.sampled, results.scores.len()), (plain_results.sampled, 0));

    let log = log.lock().unwrap();
    let seen: Vec<_> =
        log.iter().map(|operation| (operation.name, operation.rows, operation.matrix)).collect();
    assert_eq!(
        seen,
        [
            ("begin_step", 4, None),
            ("embed", 4, None),
            ("rope_angles", 4, None),
            ("linear", 4, Some([64, WIDTH])),
            ("rotate_and_store", 4, None),
            ("attention", 4, None),
            ("keep_logit_rows", 4, None),
            ("keep_logit_rows", 4, None),
            ("linear_add", 2, Some([WIDTH, 32])),
            ("all_reduce", 2, None),
            ("argmax", 2, Some([VOCABULARY, WIDTH])),
            ("linear", 2, Some([VOCABULARY, WIDTH])),
            ("sample", 2, None),
        ]
    );
    assert_eq!(log[3].product_operations, 2.0 * (4 * 64 * WIDTH) as f64);
    assert!(log[3].bytes >= (4 * 64 * WIDTH) as f64);
    // The queries at positions 2, 3 and 4 see 3, 4 and 5 keys, the query at position 0 sees one.
    assert_eq!(log[5].flops, f64::from(4 * 2 * 16 * (3 + 4 + 5 + 1)));
    // The rows read 5 keys and 1 key, and as many values, of two bytes per element.
    assert_eq!(log[5].bytes, f64::from(2 * 2 * 16 * (5 + 1)));
}

#[test]
fn an_observer_can_refuse_an_operation() {
    let (mut device, log) = recorder(Some("attention"));
    assert!(matches!(layer(&mut device), Err(DeviceError::Misuse(why)) if why.contains("observer")));
    assert_eq!(log.lock().unwrap().last().unwrap().name, "attention");
}

#[test]
fn a_head_has_its_screen_under_a_recorder_and_products_read_the_head() {
    let (mut device, log) = recorder(None);
    let values = bytes(WeightType::F32, &Random::new(8).normals(VOCABULARY * WIDTH, 0.3));
    let source = [HostMatrix::new(&values, WeightType::F32, VOCABULARY, WIDTH)];
    let head = device.head_matrix(&source, Quantize::None).unwrap();
    let plain = device.matrix(&source, Quantize::None).unwrap();
    let screen = device.screen_bytes(&head);
    assert!(screen > 0 && device.matrix_bytes(&head) == device.matrix_bytes(&plain) + screen);
    let (x, mut logits) = (device.tensor(1, WIDTH).unwrap(), device.tensor(1, VOCABULARY).unwrap());
    device.argmax(Argmax { x: &x, norm: None, weight: &head, logits: &mut logits, allowed: &[] }).unwrap();
    assert_eq!(log.lock().unwrap()[0].bytes, device.matrix_bytes(&plain) as f64);
}

#[test]
fn a_tied_table_has_its_corrections_under_a_recorder_and_products_do_not_read_them() {
    let log = Log::default();
    let device = CpuDevice::new(1, Isa::Portable).unwrap();
    let mut device = Recorder::new(device, Logger { log: log.clone(), refused: None });
    let values = bytes(WeightType::Bf16, &Random::new(8).normals(VOCABULARY * WIDTH, 0.3));
    let source = [HostMatrix::new(&values, WeightType::Bf16, VOCABULARY, WIDTH)];
    let tied = device.tied_matrix(&source, Quantize::None).unwrap();
    let head = device.head_matrix(&source, Quantize::None).unwrap();
    let table = device.table_matrix(&source, Quantize::None).unwrap();
    // The rows of the last panel are padded.
    assert_eq!(device.matrix_bytes(&table), (VOCABULARY.next_multiple_of(16) * WIDTH * 2) as u64);
    let corrections = device.corrections_bytes(&tied);
    assert!(corrections > 0 && device.matrix_bytes(&tied) == device.matrix_bytes(&head) + corrections);
    let (mut x, mut logits) = (device.tensor(1, WIDTH).unwrap(), device.tensor(1, VOCABULARY).unwrap());
    device.upload(&[1.0; WIDTH], &mut x).unwrap();
    device.linear(Linear::plain(&x, &tied), &mut logits).unwrap();
    let read = device.matrix_bytes(&head) - device.screen_bytes(&head);
    assert_eq!(log.lock().unwrap()[0].bytes, read as f64);
}
