use super::*;

fn bytes_of<T: Element>(values: &[T]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| {
            let mut bytes = vec![0; T::BYTES];
            value.store(&mut bytes);
            bytes
        })
        .collect()
}

#[test]
fn reductions_combine_in_the_order_of_ranks() {
    let ranks = [1e8_f32, 1.0, -1e8].map(|x| bytes_of(&[x]));
    assert_eq!(reduce(Kind::F32, Reduction::Sum, &ranks), bytes_of(&[(1e8_f32 + 1.0) - 1e8]));
    let ranks = [[3, -5], [2, 7]].map(|x: [i32; 2]| bytes_of(&x));
    assert_eq!(reduce(Kind::I32, Reduction::Sum, &ranks), bytes_of(&[5, 2]));
    assert_eq!(reduce(Kind::I32, Reduction::Product, &ranks), bytes_of(&[6, -35]));
    assert_eq!(reduce(Kind::I32, Reduction::Max, &ranks), bytes_of(&[3, 7]));
    assert_eq!(reduce(Kind::I32, Reduction::Min, &ranks), bytes_of(&[2, -5]));
    let ranks = [1.0_f64, 2.0].map(|x| bytes_of(&[x]));
    assert_eq!(reduce(Kind::F64, Reduction::Average, &ranks), bytes_of(&[1.5]));
}

#[test]
fn sums_of_bf16_round_after_each_rank() {
    // bf16 cannot represent 257, so adding 1 to 256 gives 256, twice. A sum that is rounded only at the end would be
    // 258.
    let ranks = [256.0, 1.0, 1.0].map(|x| bytes_of(&[bf16::from_f32(x)]));
    assert_eq!(reduce(Kind::Bf16, Reduction::Sum, &ranks), bytes_of(&[bf16::from_f32(256.0)]));
}

#[test]
fn unknown_codes_are_none() {
    assert_eq!(Kind::of(9), Some(Kind::Bf16));
    assert_eq!((Kind::of(10), Kind::of(-1)), (None, None));
    assert_eq!((Reduction::of(4), Reduction::of(5)), (Some(Reduction::Average), None));
}
