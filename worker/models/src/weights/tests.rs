use std::{fs, path::Path};

use ::safetensors::tensor::{Dtype, TensorView};
use tutti_kernels::{
    Dense, Device, GateUp, HostMatrix, Linear, Norm, Quantize,
    collective::{Collective, CollectiveError, Patience},
    cpu::{CpuDevice, Isa, Weights},
};

use super::*;

const EXPERTS: usize = 4;
const INTERMEDIATE: usize = 6;
const HIDDEN: usize = 8;

/// A rank of a group whose other ranks do not exist. Loading needs no collective.
struct Lone(GroupRank);

impl Collective for Lone {
    fn group_rank(&self) -> GroupRank {
        self.0
    }
    fn transport(&self) -> &'static str {
        "none"
    }
    fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), CollectiveError> {
        unreachable!()
    }
    fn gather(&mut self, _: &[f32], _: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        unreachable!()
    }
    fn all_gather(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<(), CollectiveError> {
        unreachable!()
    }
    fn gather_bytes(&mut self, _: &[u8], _: Option<&mut [u8]>) -> Result<(), CollectiveError> {
        unreachable!()
    }
    fn scatter_bytes(&mut self, _: Option<&[u8]>, _: &mut [u8]) -> Result<(), CollectiveError> {
        unreachable!()
    }
    fn broadcast(&mut self, _: &mut Vec<u8>, _: Patience) -> Result<(), CollectiveError> {
        unreachable!()
    }
}

fn device(rank: usize, world_size: usize) -> CpuDevice {
    let device = CpuDevice::new(2, Isa::detect()).unwrap();
    if world_size == 1 { device } else { device.with_group(Box::new(Lone(GroupRank { rank, world_size }))) }
}

/// Returns the value of an element of an expert's gate (`which` is 0), up (1) or down (2).
fn value(expert: usize, which: usize, row: usize, column: usize) -> f32 {
    ((expert * 997 + which * 613 + row * 31 + column * 7) % 257) as f32 / 64.0 - 2.0
}

fn write(dir: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<f32>)]) {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, _, values)| match dtype {
            Dtype::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, dtype, shape, _), bytes)| {
        (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(dir.join("model.safetensors"), ::safetensors::serialize(views, None).unwrap()).unwrap();
}

fn files(dir: &Path) -> Source {
    Source::Files(SafetensorsDir::open(dir).unwrap())
}

/// Returns the columns of a matrix, computed as products with the unit vectors.
fn columns(device: &mut CpuDevice, matrix: &Weights, rows: usize, columns: usize) -> Vec<Vec<f32>> {
    let unit: Vec<f32> =
        (0..columns * columns).map(|i| f32::from(u8::from(i / columns == i % columns))).collect();
    let (mut x, mut out) = (device.tensor(columns, columns).unwrap(), device.tensor(columns, rows).unwrap());
    device.upload(&unit, &mut x).unwrap();
    device.linear(Linear::plain(&x, matrix), &mut out).unwrap();
    let mut values = Vec::new();
    device.download(&out, &mut values).unwrap();
    values.chunks(rows).map(<[f32]>::to_vec).collect()
}

/// Returns the gated product of a fixed row with a fused pair of gate and up.
fn gated(device: &mut CpuDevice, matrix: &Weights, width: usize) -> Vec<f32> {
    let norm = device.vector(&[1.0; HIDDEN]).unwrap();
    let (mut x, mut out) = (device.tensor(1, HIDDEN).unwrap(), device.tensor(1, width).unwrap());
    device.upload(&[0.5, -1.0, 2.0, 0.25, 1.5, -0.75, 1.0, -2.0], &mut x).unwrap();
    device
        .gate_up(
            GateUp { x: &x, norm: Some(Norm { weight: &norm, eps: 1e-6 }), weight: matrix, limit: None },
            &mut out,
        )
        .unwrap();
    let mut values = Vec::new();
    device.download(&out, &mut values).unwrap();
    values
}

/// Returns rows of one matrix as bytes.
fn matrix(rows: impl Iterator<Item = usize>, element: impl Fn(usize, usize) -> f32) -> Vec<u8> {
    rows.flat_map(|row| (0..HIDDEN).map(move |column| (row, column)))
        .flat_map(|(row, column)| element(row, column).to_le_bytes())
        .collect()
}

/// Tests stacked experts, stored plainly or transposed, with whole experts per rank or a share of each expert. Every
/// rank must hold the same numbers as with separate tensors per expert.
#[test]
fn stacked_experts_are_loaded_like_single_matrices() {
    let dir = tempfile::tempdir().unwrap();
    let (tall, elements) = (2 * INTERMEDIATE, EXPERTS * 2 * INTERMEDIATE * HIDDEN);
    let gate_up = |expert: usize, row: usize, column: usize| {
        value(expert, row / INTERMEDIATE, row % INTERMEDIATE, column)
    };
    let plain = (0..elements).map(|i| gate_up(i / (tall * HIDDEN), i / HIDDEN % tall, i % HIDDEN)).collect();
    let turned = (0..elements).map(|i| gate_up(i / (tall * HIDDEN), i % tall, i / tall % HIDDEN)).collect();
    let down = (0..elements / 2)
        .map(|i| value(i / (INTERMEDIATE * HIDDEN), 2, i / INTERMEDIATE % HIDDEN, i % INTERMEDIATE))
        .collect();
    write(
        dir.path(),
        &[
            ("plain", Dtype::F32, vec![EXPERTS, tall, HIDDEN], plain),
            ("turned", Dtype::F32, vec![EXPERTS, HIDDEN, tall], turned),
            ("down", Dtype::F32, vec![EXPERTS, HIDDEN, INTERMEDIATE], down),
        ],
    );
    let stack = |name| TensorSpec::stack(name, Role::Projection, [EXPERTS, tall, HIDDEN]).in_parts(2);
    let down = TensorSpec::stack("down", Role::Projection, [EXPERTS, HIDDEN, INTERMEDIATE]);
    for (rank, world_size, whole_experts) in [(0, 1, true), (1, 2, true), (1, 2, false), (2, 3, false)] {
        let (up_cut, down_cut) = match whole_experts {
            true => (Cut::Matrices, Cut::Matrices),
            false => (Cut::Rows(INTERMEDIATE), Cut::Columns(INTERMEDIATE)),
        };
        let specs = [
            stack("plain").cut(up_cut),
            stack("turned").transposed().cut(up_cut),
            down.clone().cut(down_cut),
        ];
        let mut device = device(rank, world_size);
        let mut last = None;
        let mut progress = |progress| last = Some(progress);
        let mut loader =
            Loader::new(files(dir.path()), Quantize::None, specs.iter(), &mut device, &mut progress).unwrap();
        let mut ups = [loader.gate_ups(&specs[0]).unwrap(), loader.gate_ups(&specs[1]).unwrap()];
        let downs = loader.matrices(&specs[2]).unwrap();
        let held = loader.finish();
        assert_eq!(held, (4 * (2 * elements + elements / 2) / world_size) as u64);
        assert!(last.is_some_and(|last: LoadProgress| last.done == last.total && last.total == held));

        let share_of = |units, whole: bool| {
            if whole { 0..units } else { share(units, GroupRank { rank, world_size }) }
        };
        let experts = share_of(EXPERTS, !whole_experts);
        let width = share_of(INTERMEDIATE, whole_experts);
        assert_eq!((ups[0].len(), downs.len()), (experts.len(), experts.len()));
        for (index, expert) in experts.enumerate() {
            let host =
                [0, 1].map(|which| matrix(width.clone(), |row, column| value(expert, which, row, column)));
            let source =
                [0, 1].map(|which| HostMatrix::new(&host[which], WeightType::F32, width.len(), HIDDEN));
            let expected = device.gate_up_matrix(source, Quantize::None).unwrap();
            let expected = gated(&mut device, &expected, width.len());
            for ups in &mut ups {
                assert_eq!(gated(&mut device, &ups[index], width.len()), expected, "expert {expert}");
            }
            let found = columns(&mut device, &downs[index], HIDDEN, width.len());
            let expected: Vec<Vec<f32>> = width
                .clone()
                .map(|column| (0..HIDDEN).map(|row| value(expert, 2, row, column)).collect())
                .collect();
            assert_eq!(found, expected, "expert {expert}");
        }
    }
}

#[test]
fn a_convolution_is_a_matrix_of_its_outputs() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[("conv", Dtype::F32, vec![2, 1, 3], vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0])]);
    let spec = TensorSpec::flattened("conv", Role::Projection, &[2, 1, 3]);
    let (mut device, mut progress) = (device(0, 1), |_| ());
    let mut loader =
        Loader::new(files(dir.path()), Quantize::None, [&spec].into_iter(), &mut device, &mut progress)
            .unwrap();
    let matrix = loader.matrix(&[&spec]).unwrap();
    assert_eq!(columns(&mut device, &matrix, 2, 3), [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]);
}

/// Loads a checkpoint of bf16 matrices with a router and norms in f32. Each tensor keeps its stored type, or gets the
/// type in its `precision`. The load options quantise only tensors whose `precision` permits it.
#[test]
fn types_and_quantisation_are_decided_tensor_by_tensor() {
    let dir = tempfile::tempdir().unwrap();
    // 1 + 2^-8 lies halfway between two bf16 numbers and is rounded down to the even one. 1 + 3 * 2^-8 is rounded up.
    let odd = vec![1.0, 1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8), -1.0 / 3.0];
    write(
        dir.path(),
        &[
            ("proj", Dtype::BF16, vec![64, 64], vec![0.5; 64 * 64]),
            ("router", Dtype::BF16, vec![4, 64], (0..256).map(|i| i as f32).collect()),
            ("norm", Dtype::F32, vec![4], odd.clone()),
            ("gate", Dtype::F32, vec![2, 2], odd.clone()),
        ],
    );
    let matrix = |name: &str, rows, columns| TensorSpec::matrix(name, Role::Projection, rows, columns);
    let proj = matrix("proj", 64, 64);
    let kept = matrix("proj", 64, 64).held_as(Precision::Stored);
    let router = matrix("router", 4, 64).held_as(Precision::Type(WeightType::F32));
    let norm = TensorSpec::vector("norm", Role::Norm, 4);
    let gate = matrix("gate", 2, 2).held_as(Precision::Type(WeightType::Bf16));
    let specs = [&proj, &kept, &router, &norm, &gate];
    let (mut device, mut progress) = (device(0, 1), |_| ());
    let source = files(dir.path());
    let mut loader =
        Loader::new(source, Quantize::Int8, specs.into_iter(), &mut device, &mut progress).unwrap();
    let mut bytes = 0;
    let mut grew = |loader: &Loader<'_, CpuDevice>| {
        let grown = loader.held() - bytes;
        bytes = loader.held();
        grown
    };
    loader.matrix(&[&proj]).unwrap();
    assert!((64 * 64..64 * 64 * 2).contains(&grew(&loader)), "quantised");
    loader.matrix(&[&kept]).unwrap();
    assert_eq!(grew(&loader), 64 * 64 * 2);
    let router = loader.matrix(&[&router]).unwrap();
    assert_eq!(grew(&loader), 4 * 64 * 4);
    loader.vector(&[&norm]).unwrap();
    assert_eq!(grew(&loader), 4 * 4);
    let gate = loader.matrix(&[&gate]).unwrap();
    assert_eq!(grew(&loader), 4 * 2);
    // Int8 would change these values, so the router is not quantised.
    let found = columns(&mut device, &router, 4, 64);
    assert_eq!(found[1], [1.0, 65.0, 129.0, 193.0]);
    let rounded = columns(&mut device, &gate, 2, 2);
    assert_eq!(rounded, [[1.0, 1.0 + 2f32.powi(-6)], [1.0, half::bf16::from_f32(-1.0 / 3.0).to_f32()]]);
}

#[test]
fn a_heads_screen_counts_as_memory_of_weights() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[("head", Dtype::BF16, vec![40, 64], vec![0.5; 40 * 64])]);
    let spec = TensorSpec::matrix("head", Role::Projection, 40, 64);
    for (screened, quantize) in
        [(true, Quantize::None), (false, Quantize::None), (true, Quantize::Int8), (false, Quantize::Int8)]
    {
        let (device, mut progress) = (device(0, 1), |_| ());
        let mut device = device.with_screened_head(screened);
        let source = files(dir.path());
        let mut loader =
            Loader::new(source, quantize, [&spec].into_iter(), &mut device, &mut progress).unwrap();
        let head = loader.head(&spec).unwrap();
        let held = loader.held();
        let screen = device.screen_bytes(&head);
        let plain = if quantize == Quantize::Int8 { device.matrix_bytes(&head) } else { 2 * 40 * 64 };
        assert_eq!(held, plain + screen, "{screened} {quantize:?}");
        assert_eq!(screen > 0, screened && quantize == Quantize::None, "{screened} {quantize:?}");
    }
}

#[test]
fn the_corrections_of_a_tied_table_count_as_memory_of_weights() {
    let dir = tempfile::tempdir().unwrap();
    let values = (0..40 * 64).map(|i| (i % 61) as f32 / 97.0).collect();
    write(dir.path(), &[("table", Dtype::BF16, vec![40, 64], values)]);
    let spec = TensorSpec::matrix("table", Role::Embedding, 40, 64);
    for isa in Isa::supported() {
        for quantize in [Quantize::None, Quantize::Int8] {
            let mut progress = |_| ();
            let mut device = CpuDevice::new(1, isa).unwrap();
            let source = files(dir.path());
            let specs = [&spec; 2].into_iter();
            let mut loader = Loader::new(source, quantize, specs, &mut device, &mut progress).unwrap();
            let table = loader.table(&spec).unwrap();
            let of_table = loader.held();
            let tied = loader.tied(&spec).unwrap();
            let of_tied = loader.held() - of_table;
            let (screen, corrections) = (device.screen_bytes(&tied), device.corrections_bytes(&tied));
            let plain = if quantize == Quantize::Int8 { device.matrix_bytes(&table) } else { 2 * 40 * 64 };
            assert_eq!(of_table, plain, "{isa} {quantize:?}");
            assert_eq!(of_tied, plain + screen + corrections, "{isa} {quantize:?}");
            let rounds = quantize == Quantize::None && isa != Isa::Avx512Bf16;
            assert_eq!(corrections > 0, rounds, "{isa} {quantize:?}");
        }
    }
}

#[test]
fn matrices_of_different_types_are_fused_only_if_they_are_held_alike() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        &[("a", Dtype::BF16, vec![1, 2], vec![1.0, 2.0]), ("b", Dtype::F32, vec![1, 2], vec![3.0, 4.0])],
    );
    let specs = |precision| {
        ["a", "b"].map(|name| TensorSpec::matrix(name, Role::Projection, 1, 2).held_as(precision))
    };
    let (mut device, mut progress) = (device(0, 1), |_| ());
    let stored = specs(Precision::Configured);
    let mut loader =
        Loader::new(files(dir.path()), Quantize::None, stored.iter(), &mut device, &mut progress).unwrap();
    let error = loader.matrix(&stored.each_ref()).err().unwrap().to_string();
    assert!(["F32", "BF16", "\"b\"", "\"a\""].iter().all(|word| error.contains(word)), "{error}");
    let alike = specs(Precision::Type(WeightType::F32));
    let mut loader =
        Loader::new(files(dir.path()), Quantize::None, alike.iter(), &mut device, &mut progress).unwrap();
    let fused = loader.matrix(&alike.each_ref()).unwrap();
    assert_eq!(columns(&mut device, &fused, 2, 2), [[1.0, 3.0], [2.0, 4.0]]);
}
