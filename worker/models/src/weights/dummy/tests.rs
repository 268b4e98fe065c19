use tutti_kernels::{HostMatrix, collective::GroupRank};

use super::{super::Cut, *};

fn whole(dummy: Dummy, spec: &TensorSpec) -> Vec<u8> {
    dummy.bytes(spec, &spec.shard_range(GroupRank::ALONE))
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
    // Rows have nine elements, so shards begin between the four elements of a random `u64`.
    let dummy = Dummy { seed: 5, dtype: WeightType::F32 };
    for cut in [Cut::Rows(6), Cut::Columns(9), Cut::Rows(3), Cut::Replicated] {
        let spec = TensorSpec::matrix("w", Role::Projection, 6, 9).cut(cut);
        let bytes = whole(dummy, &spec);
        let view = HostMatrix::new(&bytes, WeightType::F32, 6, 9);
        for rank in 0..3 {
            let range = spec.shard_range(GroupRank { rank, world_size: 3 });
            assert_eq!(dummy.bytes(&spec, &range), *range.slice(view), "{cut:?} at rank {rank}");
        }
    }
}
