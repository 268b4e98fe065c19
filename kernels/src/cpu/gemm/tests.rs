use super::*;
use crate::cpu::memory::fused_matrices::FusedMatrices;
use crate::cpu::memory::matrix::Form;
use crate::cpu::simd::isa::testable;
use crate::cpu::simd::{LANES, Op, Simd, from_bf16, to_bf16};
use crate::cpu::testing::Random;
use crate::{HostMatrix, WeightType};

/// One output, computed as a chain of multiply-adds. In each pair of inputs, the odd input is added before the even
/// one.
struct Chain<'a>(&'a [f32], &'a [f32]);
impl Op for Chain<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sum = s.splat(0.0);
        for (x, w) in self.0.chunks(2).zip(self.1.chunks(2)) {
            for (x, w) in x.iter().zip(w).rev() {
                sum = s.fma(s.splat(*x), s.splat(*w), sum);
            }
        }
        let mut lanes = [0.0; LANES];
        s.store_some(&mut lanes, sum);
        lanes[0]
    }
}

/// Checks that products of bfloat16 pairs have the bits of chains of multiply-adds on every instruction path. Paths
/// without the dot-product instruction emulate it. Only unit tests compile the emulation.
#[test]
fn packed_pairs_give_the_bits_of_chains_of_multiply_adds() {
    let mut random = Random::new(11);
    for isa in testable("bfloat16 pairs") {
        let path = Path::new(isa).unwrap();
        for threads in [1, 2] {
            let mut pool = ThreadPool::new(threads).unwrap();
            for (rows, inputs, outputs) in
                [(1, 64, 100), (2, 7, 17), (7, 33, 40), (16, 1090, 50), (29, 128, 70), (200, 66, 48)]
            {
                let weights: Vec<u16> =
                    random.normals(inputs * outputs, 1.0).into_iter().map(to_bf16).collect();
                let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
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
                let mut dots = vec![0.0; rows * outputs];
                let (input, epilogue) = (Input { values: &x, norm: None }, Epilogue::Set(None));
                let product =
                    Product { x: input, groups: &groups, matrices: &matrices, epilogue, out: &mut dots };
                multiply::<Dots>(path, &mut pool, &mut scratch, product).unwrap();
                let x: Vec<f32> = x.into_iter().map(|x| from_bf16(to_bf16(x))).collect();
                let weights: Vec<f32> = weights.into_iter().map(from_bf16).collect();
                let chains: Vec<f32> = x
                    .chunks(inputs)
                    .flat_map(|x| weights.chunks(inputs).map(move |w| path.run(Chain(x, w))))
                    .collect();
                assert_eq!(dots, chains, "{isa} {threads} {rows}x{inputs}x{outputs}");
            }
        }
    }
}
