//! Tests that calls which violate the contract of `Device` are refused, and that the device remains usable.

use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::{
    Attention, AttentionShape, Dense, Device, DeviceError, Embed, HostMatrix, KvShape, KvType, Linear, Norm,
    PageId, PagedAttention, PlanesShape, Quantize, RowInputs, SlotCopy, SlotId, StepInputs, WeightType,
};

use crate::support::{Share, begin, bytes, devices, matrix, tensor, try_begin};

#[test]
fn operands_that_do_not_fit_are_refused() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let weight = matrix(&mut device, WeightType::F32, 8, &[1.0; 32]);
    let (x, narrow) = (tensor(&mut device, 4, &[1.0; 12]), tensor(&mut device, 3, &[1.0; 9]));
    let short = device.vector(&[0.0; 7]).unwrap();
    let (mut out, mut low) = (device.tensor(3, 8).unwrap(), device.tensor(2, 8).unwrap());
    let refused = |result: Result<(), DeviceError>| {
        assert!(matches!(result, Err(DeviceError::Misuse(_))), "{result:?}")
    };
    refused(device.linear(Linear::plain(&narrow, &weight), &mut out));
    refused(device.linear(Linear { bias: Some(&short), ..Linear::plain(&x, &weight) }, &mut out));
    refused(device.linear(Linear::plain(&x, &weight), &mut low));
    // `out` has no live rows to add to.
    let mut empty = device.tensor(3, 8).unwrap();
    refused(device.linear_add(Linear::plain(&x, &weight), &mut empty));
    refused(device.rms_norm(&x, Norm { weight: &short, eps: 1e-6 }, &mut out));
    refused(device.linear(
        Linear { norm: Some(Norm { weight: &short, eps: 1e-6 }), ..Linear::plain(&x, &weight) },
        &mut out,
    ));
    begin(&mut device, &[Share { tokens: 1, ..Share::default() }], &[8], &[]);
    let mut embedded = device.tensor(1, 4).unwrap();
    refused(device.embed(Embed { table: &weight, shard: None }, &mut embedded));
    device.linear(Linear::plain(&x, &weight), &mut out).unwrap();
    assert_eq!(out.values(), [4.0; 24]);
}

/// Paths without dot products of bfloat16 hold a matrix for products and a table of embeddings in different forms.
#[test]
fn rounded_weights_are_not_looked_up_and_tables_are_not_multiplied() {
    for (name, mut device) in devices("tables and matrices") {
        if name.starts_with("avx512-bf16") {
            continue;
        }
        let bytes = bytes(WeightType::Bf16, &[1.0; 8 * 4]);
        let source = [HostMatrix::new(&bytes, WeightType::Bf16, 8, 4)];
        let weight = device.matrix(&source, Quantize::None).unwrap();
        let table = device.table_matrix(&source, Quantize::None).unwrap();
        begin(&mut device, &[Share { tokens: 1, ..Share::default() }], &[7], &[]);
        let mut embedded = device.tensor(1, 4).unwrap();
        let refused = device.embed(Embed { table: &weight, shard: None }, &mut embedded);
        let why = "a matrix of rounded weights, where a table of embeddings is wanted";
        assert_eq!(refused, Err(DeviceError::Misuse(why.into())), "{name}");
        device.embed(Embed { table: &table, shard: None }, &mut embedded).unwrap();
        let mut out = device.tensor(1, 8).unwrap();
        let refused = device.linear(Linear::plain(&embedded, &table), &mut out);
        let why = "a table of embeddings, where a matrix for products is wanted";
        assert_eq!(refused, Err(DeviceError::Misuse(why.into())), "{name}");
    }
}

#[test]
fn what_cannot_be_had_is_named() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let shape = KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 32,
        page_tokens: 16,
        pages: 4,
        dtype: KvType::Full(WeightType::F32),
    };
    let mut planes =
        |kv: KvShape| device.planes(&PlanesShape { kv: Some(kv), ..PlanesShape::default() }).map(drop);
    planes(shape).unwrap();
    for wrong in [
        KvShape { page_tokens: 24, ..shape },
        KvShape { page_tokens: 0, ..shape },
        KvShape { head_dim: 20, ..shape },
    ] {
        assert!(matches!(planes(wrong), Err(DeviceError::Unsupported(_))));
    }
    let huge = KvShape { pages: usize::MAX / 8, ..shape };
    assert!(matches!(planes(huge), Err(DeviceError::OutOfMemory { .. })));
    assert!(matches!(device.tensor(1 << 40, 1 << 20), Err(DeviceError::OutOfMemory { .. })));
    for isa in Isa::ALL {
        assert_eq!(CpuDevice::new(1, isa).is_ok(), isa.available(), "{isa}");
    }
}

fn kv_shape() -> KvShape {
    KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 16,
        page_tokens: 16,
        pages: 4,
        dtype: KvType::Full(WeightType::F32),
    }
}

#[test]
fn a_step_is_refused_before_anything_runs() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let shape = PlanesShape { kv: Some(kv_shape()), slot_bytes: vec![4], slots: 4, ..PlanesShape::default() };
    let mut planes = device.planes(&shape).unwrap();
    for slot in 1..4 {
        device.write_slot(&mut planes, SlotId(slot), &[slot as u8; 4]).unwrap();
    }
    let (copies, tables) = ([SlotCopy { from: SlotId(1), to: SlotId(2) }], [[PageId(1)], [PageId(2)]]);
    let row = |first_token: usize, slot: u32| RowInputs {
        first_token,
        tokens: 1,
        start: 0,
        slot: SlotId(slot),
        continues: false,
        block_table: &tables[first_token],
    };
    let good = [row(0, 1), row(1, 3)];
    let inputs = StepInputs {
        token_ids: &[5, 6],
        positions: [&[0.0, 0.0]; 3],
        rows: &good,
        copies: &copies,
        logit_rows: &[0, 1],
        shape: None,
    };
    let state = |device: &mut CpuDevice, planes: &_, slot| {
        let mut out = Vec::new();
        device.read_slot(planes, SlotId(slot), &mut out).unwrap();
        out
    };
    let long_table = [PageId(1), PageId(7)];
    for (what, rows) in [
        ("one slot twice", [row(0, 1), row(1, 1)]),
        ("a slot outside", [row(0, 1), row(1, 4)]),
        ("a row that continues", [row(0, 1), RowInputs { continues: true, ..row(1, 2) }]),
        ("a page twice", [row(0, 1), RowInputs { block_table: &tables[0], ..row(1, 2) }]),
        ("a page outside", [row(0, 1), RowInputs { start: 20, block_table: &long_table, ..row(1, 2) }]),
        ("too few pages", [row(0, 1), RowInputs { start: 16, ..row(1, 2) }]),
    ] {
        let refused = device.begin_step(&StepInputs { rows: &rows, ..inputs }, &mut planes);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{what}");
        assert_eq!(state(&mut device, &planes, 2), [2; 4], "{what}: a copy ran");
    }
    for (what, inputs) in [
        ("logit rows that do not ascend", StepInputs { logit_rows: &[1, 0], ..inputs }),
        ("a logit row outside", StepInputs { logit_rows: &[2], ..inputs }),
        (
            "a copy to the null slot",
            StepInputs { copies: &[copies[0], SlotCopy { from: SlotId(1), to: SlotId::NULL }], ..inputs },
        ),
    ] {
        let refused = device.begin_step(&inputs, &mut planes);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{what}");
        assert_eq!(state(&mut device, &planes, 2), [2; 4], "{what}: a copy ran");
    }
    let mut without = device.planes(&PlanesShape { slot_bytes: vec![], ..shape }).unwrap();
    let refused = device.begin_step(&inputs, &mut without);
    assert!(matches!(refused, Err(DeviceError::Misuse(_))), "copies without a slot plane");
    // Without slot planes, any slot number is valid.
    device.begin_step(&StepInputs { copies: &[], ..inputs }, &mut without).unwrap();

    device.begin_step(&inputs, &mut planes).unwrap();
    assert_eq!(state(&mut device, &planes, 2), [1; 4]);
}

#[test]
fn copies_run_in_order_before_the_step() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let mut planes =
        device.planes(&PlanesShape { slot_bytes: vec![2, 5], slots: 4, ..PlanesShape::default() }).unwrap();
    for slot in 1..4 {
        device.write_slot(&mut planes, SlotId(slot), &[slot as u8; 7]).unwrap();
    }
    let copy = |from, to| SlotCopy { from: SlotId(from), to: SlotId(to) };
    // Slot 1 is saved in slot 3, then set to zeros, then slot 2 receives the saved state.
    let copies = [copy(1, 3), copy(0, 1), copy(3, 2)];
    let inputs = StepInputs {
        token_ids: &[],
        positions: [&[]; 3],
        rows: &[],
        copies: &copies,
        logit_rows: &[],
        shape: None,
    };
    device.begin_step(&inputs, &mut planes).unwrap();
    let mut states = Vec::new();
    for slot in 1..4 {
        device.read_slot(&planes, SlotId(slot), &mut states).unwrap();
    }
    assert_eq!(states, [[0; 7], [1; 7], [1; 7]].concat());
}

#[test]
fn planes_without_pages_take_no_attention() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let mut planes = device.planes(&PlanesShape::default()).unwrap();
    try_begin(&mut device, &mut planes, &[Share { tokens: 1, ..Share::default() }], &[], &[]).unwrap();
    let (qkv, mut out) = (tensor(&mut device, 48, &[1.0; 48]), device.tensor(1, 16).unwrap());
    let shape = AttentionShape { heads: 1, kv_heads: 1, head_dim: 16, scale: 1.0, window: None };
    let refused = device.attention(Attention { qkv: &qkv, shape, planes: &planes, layer: 0 }, &mut out);
    assert!(matches!(refused, Err(DeviceError::Misuse(_))));
    assert!(device.read_pages(&planes, &[PageId(1)], &mut Vec::new()).is_err());
    assert!(device.write_pages(&mut planes, &[PageId(1)], &[]).is_err());
}
