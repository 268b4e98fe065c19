use super::*;
use crate::cpu::memory::fused_matrices::FusedMatrices;
use crate::cpu::memory::matrix::Form;
use crate::cpu::simd::isa::testable;
use crate::cpu::simd::to_bf16;
use crate::cpu::testing::Random;
use crate::{HostMatrix, WeightType};

/// Checks everything around the dot-product instruction without the instruction: pairs that are multiplied by other
/// means give the same bits as widened elements.
#[test]
fn packed_pairs_give_the_bits_of_widened_elements() {
    let mut random = Random::new(11);
    for isa in testable("bfloat16 pairs") {
        let path = Path::new(isa).unwrap();
        for threads in [1, 2] {
            let mut pool = ThreadPool::new(threads).unwrap();
            for (rows, inputs, outputs) in
                [(1, 64, 100), (2, 7, 17), (7, 33, 40), (16, 1090, 50), (29, 128, 70), (200, 66, 48)]
            {
                let bytes: Vec<u8> = random
                    .normals(inputs * outputs, 1.0)
                    .into_iter()
                    .flat_map(|x| to_bf16(x).to_le_bytes())
                    .collect();
                let (dtype, columns) = (WeightType::Bf16, inputs);
                let source = HostMatrix::new(&bytes, dtype, outputs, columns);
                let source = [source];
                let source = FusedMatrices::new(&source, false).unwrap();
                let matrix = Matrix::pack(Form::Stored(dtype), &mut pool, source).unwrap();
                let matrices = [Weights::Stored(matrix)];
                let groups = [Group::whole(rows)];
                let x = random.normals(rows * inputs, 1.0);
                let mut scratch = Scratch::new(threads).unwrap();
                scratch.fit(rows, inputs).unwrap();
                let (mut dots, mut widened) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs]);
                let product = |out| {
                    let x = Input { values: &x, norm: None };
                    let epilogue = Epilogue::Set(None);
                    Product { x, groups: &groups, matrices: &matrices, epilogue, out }
                };
                multiply::<Dots>(path, &mut pool, &mut scratch, product(&mut dots)).unwrap();
                multiply::<Widened<Bf16>>(path, &mut pool, &mut scratch, product(&mut widened)).unwrap();
                assert_eq!(dots, widened, "{isa} {threads} {rows}x{inputs}x{outputs}");
            }
        }
    }
}
