use tutti_kernels::{
    collective::GroupRank,
    cpu::{CpuDevice, Isa},
};

use super::{super::Cut, *};

fn draw(dummy: Dummy, spec: &TensorSpec, group_rank: GroupRank) -> Vec<u8> {
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    let windows = spec.shard_range(group_rank).all_windows().collect::<Vec<_>>();
    windows.iter().flat_map(|window| dummy.bytes(&mut device, spec, window).unwrap()).collect()
}

fn whole(dummy: Dummy, spec: &TensorSpec) -> Vec<u8> {
    draw(dummy, spec, GroupRank::ALONE)
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
}

#[test]
fn weights_have_zero_mean_and_the_variance_of_their_role() {
    let dummy = Dummy { seed: 3, dtype: WeightType::Bf16 };
    for (role, variance) in [(Role::Projection, 1f32 / 64.0), (Role::Embedding, 1.0)] {
        let values = floats(&whole(dummy, &TensorSpec::matrix("w", role, 256, 64)));
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let found = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.02 * variance.sqrt(), "mean {mean}");
        assert!((found / variance - 1.0).abs() < 0.05, "variance {found}, {variance} wanted");
    }
    let norm = TensorSpec::vector("n", Role::Norm, 5);
    assert!(floats(&whole(dummy, &norm)).iter().all(|v| *v == 1.0));
}

#[test]
fn name_and_seed_decide() {
    let draw = |seed, name| {
        let spec = TensorSpec::matrix(name, Role::Projection, 3, 5);
        whole(Dummy { seed, dtype: WeightType::F32 }, &spec)
    };
    assert_eq!(draw(1, "a"), draw(1, "a"));
    assert_ne!(draw(1, "a"), draw(1, "b"));
    assert_ne!(draw(1, "a"), draw(2, "a"));
}

#[test]
fn a_shard_is_what_the_whole_has_there() {
    // A row has nine elements, so some shards begin in the middle of the four elements of a random `u64`.
    let dummy = Dummy { seed: 5, dtype: WeightType::F32 };
    let matrix = TensorSpec::matrix("w", Role::Projection, 6, 9);
    let stack = TensorSpec::stack("s", Role::Projection, [3, 6, 9]).in_parts(2);
    for (spec, cuts) in [
        (matrix, &[Cut::Rows(6), Cut::Columns(9), Cut::Rows(3), Cut::Replicated][..]),
        (stack, &[Cut::Matrices, Cut::Rows(3), Cut::Columns(3)]),
    ] {
        let bytes = whole(dummy, &spec);
        for &cut in cuts {
            let spec = spec.clone().cut(cut);
            for rank in 0..3 {
                let group_rank = GroupRank { rank, world_size: 3 };
                let expected: Vec<u8> = spec
                    .shard_range(group_rank)
                    .all_windows()
                    .flat_map(|window| {
                        let view = window.view(&bytes, WeightType::F32);
                        (0..view.rows).flat_map(|row| view.row(row).to_vec()).collect::<Vec<_>>()
                    })
                    .collect();
                assert_eq!(draw(dummy, &spec, group_rank), expected, "{cut:?} at rank {rank}");
            }
        }
    }
}

const VALUES: [f32; 6] =
    [0.894_653_26, -0.370_330_78, 0.240_844_71, 0.745_117_1, 0.090_057_366, -0.177_490_22];

/// Compares with values of a second implementation of the generator. A change of these values would change all dummy
/// models.
#[test]
fn the_values_of_a_seed_stay() {
    let spec = TensorSpec::matrix("w", Role::Projection, 2, 3);
    let bytes = whole(Dummy { seed: 3, dtype: WeightType::F32 }, &spec);
    let found: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(found, VALUES);
}

#[test]
fn a_tensor_has_the_type_of_its_precision() {
    let dummy = Dummy { seed: 5, dtype: WeightType::Bf16 };
    let router = TensorSpec::matrix("r", Role::Projection, 2, 3).held_as(Precision::Type(WeightType::F32));
    assert_eq!((dummy.dtype(&router), whole(dummy, &router).len()), (WeightType::F32, 24));
    // A tensor drawn by several tasks equals one drawn by a single task.
    let long = TensorSpec::vector("l", Role::Projection, 3 * TASK_ELEMENTS + 5);
    let bytes = whole(dummy, &long);
    let mut one = vec![0; bytes.len()];
    let window = long.shard_range(GroupRank::ALONE).all_windows().next().unwrap();
    dummy.fill_rows(&long, &window, 0, &mut one);
    assert!(bytes == one);
}
