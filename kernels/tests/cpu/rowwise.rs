//! Tests operations on single rows: embedding, norms, rotary angles, and copies of rows.

use tutti_kernels::cpu::{CpuDevice, Weights};
use tutti_kernels::{
    Dense, Device, DeviceError, Embed, HostMatrix, Linear, Norm, PageId, PagedAttention, PlanesShape,
    Quantize, RopeFrequencies, RowInputs, SlotId, StepInputs, WeightType,
};

use crate::support::{Random, Share, assert_near, begin, bits, bytes, devices, stored, tensor, try_begin};

/// A method that loads a matrix.
type Load = fn(&mut CpuDevice, &[HostMatrix<'_>], Quantize) -> Result<Weights, DeviceError>;

fn step(tokens: usize) -> Vec<Share> {
    vec![Share { tokens, pages: vec![PageId(1); tokens.div_ceil(16)], ..Share::default() }]
}

/// Tests a table, and a tied table (which is also the LM head).
#[test]
fn embeddings_have_the_bits_of_the_checkpoint_on_every_path() {
    const LOADS: [Load; 2] = [CpuDevice::table_matrix, CpuDevice::tied_matrix];
    for (name, mut device) in devices("embed") {
        for dtype in [WeightType::F32, WeightType::F16, WeightType::Bf16] {
            for (width, load) in [19, 200].into_iter().flat_map(|width| LOADS.map(|load| (width, load))) {
                let mut values = Random::new(5).normals(37 * width, 1.0);
                // The row has one large element, beside which block floating point rounds the other elements coarsely.
                values[15 * width] = 1000.0;
                let source = bytes(dtype, &values);
                let source = HostMatrix::new(&source, dtype, 37, width);
                let table = load(&mut device, &[source], Quantize::None).unwrap();
                let ids = [36, 0, 15, 16, 36];
                begin(&mut device, &step(5), &ids, &[]);
                let mut out = device.tensor(8, width).unwrap();
                device.embed(Embed { table: &table, shard: None }, &mut out).unwrap();
                let row = |&id: &u32| &values[id as usize * width..][..width];
                let want: Vec<f32> = ids.iter().flat_map(row).map(|&x| stored(dtype, x)).collect();
                assert_eq!(bits(out.values()), bits(&want), "{name} {dtype:?} {width}");
            }
        }
    }
}

#[test]
fn products_of_a_tied_table_are_those_of_a_head() {
    for (name, mut device) in devices("tied products") {
        let values = bytes(WeightType::Bf16, &Random::new(5).normals(37 * 200, 1.0));
        let source = [HostMatrix::new(&values, WeightType::Bf16, 37, 200)];
        let x = tensor(&mut device, 200, &Random::new(6).normals(3 * 200, 1.0));
        let [tied, head] = [CpuDevice::tied_matrix, CpuDevice::head_matrix].map(|load: Load| {
            let weight = load(&mut device, &source, Quantize::None).unwrap();
            let mut out = device.tensor(3, 37).unwrap();
            device.linear(Linear::plain(&x, &weight), &mut out).unwrap();
            bits(out.values())
        });
        assert_eq!(tied, head, "{name}");
    }
}

#[test]
fn norms_are_those_of_double_precision() {
    for (name, mut device) in devices("norm") {
        for width in [1, 16, 19, 1024] {
            let mut random = Random::new(6);
            let (x, weight) = (random.normals(30 * width, 3.0), random.normals(width, 1.0));
            let input = tensor(&mut device, width, &x);
            let vector = device.vector(&weight).unwrap();
            let mut out = device.tensor(30, width).unwrap();
            device.rms_norm(&input, Norm { weight: &vector, eps: 1e-6 }, &mut out).unwrap();
            let mut want = Vec::new();
            for row in x.chunks(width) {
                let square: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                let factor = 1.0 / (square + 1e-6).sqrt();
                want.extend(row.iter().zip(&weight).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)));
            }
            assert_near(&format!("{name} {width}"), out.values(), &want, 1e-6);
        }
    }
}

#[test]
fn angles_are_right_far_beyond_any_table() {
    let inverse: Vec<f32> = (0..16).map(|i| 1e6_f32.powf(-(i as f32) / 16.0)).collect();
    let rope = RopeFrequencies { inverse: inverse.clone(), scale: 1.25, axes: vec![] };
    for (name, mut device) in devices("rope") {
        let start = 131_000;
        let pages = vec![PageId(1); (start + 40_usize).div_ceil(16)];
        begin(&mut device, &[Share { tokens: 40, start, pages, ..Share::default() }], &[], &[]);
        let mut out = device.tensor(40, 32).unwrap();
        device.rope_angles(&rope, &mut out).unwrap();
        for (token, row) in out.values().chunks(32).enumerate() {
            for (i, inverse) in inverse.iter().enumerate() {
                let angle = f64::from((start + token) as f32 * inverse);
                let want = [angle.cos() * 1.25, angle.sin() * 1.25];
                let got = [row[i], row[16 + i]];
                assert!((f64::from(got[0]) - want[0]).abs() < 2e-7, "{name} {token} {i}");
                assert!((f64::from(got[1]) - want[1]).abs() < 2e-7, "{name} {token} {i}");
            }
        }
    }
}

#[test]
fn each_frequency_reads_its_own_axis() {
    let rope = |axes: Vec<u8>| RopeFrequencies { inverse: vec![0.5, 0.25, 0.125], scale: 2.0, axes };
    for (name, mut device) in devices("axes") {
        let mut planes = device.planes(&PlanesShape::default()).unwrap();
        let (time, height, width) = ([3.0, 4.0], [5.0, 6.0], [7.0, 9.0]);
        let row = RowInputs {
            first_token: 0,
            tokens: 2,
            start: 0,
            slot: SlotId::NULL,
            continues: false,
            block_table: &[],
        };
        let (positions, rows) = ([&time[..], &height, &width], [row]);
        let inputs = StepInputs {
            token_ids: &[0, 0],
            positions,
            rows: &rows,
            copies: &[],
            logit_rows: &[],
            shape: None,
        };
        device.begin_step(&inputs, &mut planes).unwrap();
        let mut out = device.tensor(2, 6).unwrap();
        for axes in [vec![], vec![2, 0, 1], vec![1, 1, 2]] {
            device.rope_angles(&rope(axes.clone()), &mut out).unwrap();
            for (token, row) in out.values().chunks(6).enumerate() {
                for (i, inverse) in [0.5, 0.25, 0.125].into_iter().enumerate() {
                    let axis = axes.get(i).copied().unwrap_or(0);
                    let angle = f64::from(positions[usize::from(axis)][token]) * inverse;
                    assert_eq!(row[i], angle.cos() as f32 * 2.0, "{name} {axes:?}");
                    assert_eq!(row[3 + i], angle.sin() as f32 * 2.0, "{name} {axes:?}");
                }
            }
        }
        for bad in [vec![0, 1], vec![0, 1, 3], vec![0; 4]] {
            let refused = device.rope_angles(&rope(bad.clone()), &mut out);
            assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{name} {bad:?}");
        }
    }
}

#[test]
fn rows_without_logits_are_dropped_and_the_others_copied_tile_by_tile() {
    for (name, mut device) in devices("rows") {
        let values: Vec<f32> = (0..30).map(|i| i as f32).collect();
        let mut x = tensor(&mut device, 3, &values);
        begin(&mut device, &step(10), &[], &[1, 4, 9]);
        device.keep_logit_rows(&mut x).unwrap();
        assert_eq!(x.values(), [3.0, 4.0, 5.0, 12.0, 13.0, 14.0, 27.0, 28.0, 29.0], "{name}");
        let mut out = device.tensor(2, 3).unwrap();
        device.copy_rows(&x, 0..2, &mut out).unwrap();
        assert_eq!(out.values(), [3.0, 4.0, 5.0, 12.0, 13.0, 14.0], "{name}");
        device.copy_rows(&x, 2..3, &mut out).unwrap();
        assert_eq!(out.values(), [27.0, 28.0, 29.0], "{name}");
        assert!(matches!(device.copy_rows(&x, 2..4, &mut out), Err(DeviceError::Misuse(_))), "{name}");
        // Row 9 does not exist any more. Rows that do not ascend could be overwritten before they are read.
        assert!(matches!(device.keep_logit_rows(&mut x), Err(DeviceError::Misuse(_))), "{name}");
        let mut planes = device.planes(&PlanesShape::default()).unwrap();
        let refused = try_begin(&mut device, &mut planes, &step(10), &[], &[2, 1]);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{name}");
        begin(&mut device, &step(10), &[], &[]);
        device.keep_logit_rows(&mut x).unwrap();
        assert_eq!(x.live(), 0, "{name}");
    }
}

#[test]
fn rows_from_the_host_replace_others_and_come_back() {
    for (name, mut device) in devices("rows") {
        let mut x = device.tensor(4, 2).unwrap();
        device.upload(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &mut x).unwrap();
        device.overwrite_rows(&mut x, 1, &[-3.0, -4.0, -5.0, -6.0]).unwrap();
        let mut back = vec![0.5];
        device.download(&x, &mut back).unwrap();
        assert_eq!(back, [0.5, 1.0, 2.0, -3.0, -4.0, -5.0, -6.0], "{name}");
        for (first, values) in [(2, &[1.0; 4][..]), (0, &[1.0]), (usize::MAX, &[1.0; 2])] {
            assert!(matches!(device.overwrite_rows(&mut x, first, values), Err(DeviceError::Misuse(_))));
        }
        assert!(device.upload(&[0.0; 10], &mut x).is_err(), "five rows into four");
    }
}
