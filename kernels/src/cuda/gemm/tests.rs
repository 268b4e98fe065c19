//! Tests the choice of algorithms on an emulated GPU, each test in a process of its own.

use tutti_emulated_programs::Gpus;

use super::plan::{BUCKETS, Key};
use crate::cuda::context::Gpu;
use crate::cuda::memory::{DeviceBuffer, PinnedBuffer};
use crate::cuda::tensor::{Matrix, WeightLoader};
use crate::{HostMatrix, WeightType};

use super::{Accumulate, Gemm, Product};

const OUTPUTS: usize = 24;
const INPUTS: usize = 160;
/// Most rows of a product.
const MOST: usize = 300;

/// Numbers between -1 and 1 whose sums round.
fn numbers(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| ((i * 7919 % 1009) as f32 / 504.5 - 1.0).to_le_bytes()).collect()
}

/// A plan of products with one matrix, and the products.
struct Setting {
    gemm: Gemm,
    matrix: Matrix,
    x: DeviceBuffer,
    out: DeviceBuffer,
}

impl Setting {
    fn new() -> Self {
        let gpu = Gpu::open(0).unwrap();
        let weights = numbers(OUTPUTS * INPUTS);
        let source = HostMatrix::new(&weights, WeightType::F32, OUTPUTS, INPUTS);
        let matrix = Matrix::load(&gpu, &mut WeightLoader::new(&gpu), &[source], false).unwrap();
        let mut gemm = Gemm::new(&gpu).unwrap();
        gemm.prepare(&matrix).unwrap();
        let bytes = numbers(MOST * INPUTS);
        let x = DeviceBuffer::new(&gpu, bytes.len(), "input").unwrap();
        let mut pinned = PinnedBuffer::new(&gpu, bytes.len()).unwrap();
        pinned.bytes_mut().copy_from_slice(&bytes);
        x.copy_in(0, &pinned, bytes.len()).unwrap();
        let out = DeviceBuffer::new(&gpu, MOST * OUTPUTS * 4, "output").unwrap();
        Self { gemm, matrix, x, out }
    }

    /// The output of a product of the first `rows` rows.
    fn product(&mut self, rows: usize) -> Vec<u8> {
        let product = Product {
            x: self.x.at(),
            rows,
            matrix: &self.matrix,
            accumulate: Accumulate::Set,
            out: self.out.at(),
        };
        self.gemm.product(&product).unwrap();
        let bytes = rows * OUTPUTS * 4;
        let mut pinned = PinnedBuffer::new(&self.gemm.gpu, bytes).unwrap();
        self.out.copy_out(0, bytes, &mut pinned, 0).unwrap();
        self.gemm.gpu.synchronize().unwrap();
        pinned.bytes().to_vec()
    }
}

#[test]
fn algorithms_with_other_bits_are_not_chosen() {
    let test = "cuda::gemm::tests::algorithms_with_other_bits_are_not_chosen";
    Gpus::new(1).with("EMULATED_CUBLASLT_ALGORITHMS", 3).run(test, |_| {
        let mut setting = Setting::new();
        let plan = &setting.gemm.plans[&Key::of(&setting.matrix)];
        // The library proposes an algorithm with other bits for each bucket.
        for rows in BUCKETS {
            assert!(plan.proposals(rows).unwrap().len() >= 2, "{rows} rows");
        }
        // The plain algorithm and the wide one have the same bits, and either may be the fastest.
        let reversed = plan.proposals(1).unwrap().pop().unwrap();
        assert!(plan.fastest.iter().flatten().all(|fastest| *fastest != reversed));
        let all = setting.product(MOST);
        for rows in [1, 2, 31, 32, 33, 200] {
            let bytes = rows * OUTPUTS * 4;
            assert_eq!(setting.product(rows), all[..bytes], "{rows} rows");
        }
    });
}

#[test]
fn an_algorithm_that_does_not_support_a_number_of_rows_gives_way_to_the_anchor() {
    let test =
        "cuda::gemm::tests::an_algorithm_that_does_not_support_a_number_of_rows_gives_way_to_the_anchor";
    Gpus::new(1).with("EMULATED_CUBLASLT_ALGORITHMS", 3).run(test, |_| {
        let mut setting = Setting::new();
        let all = setting.product(MOST);
        let plan = setting.gemm.plans.get_mut(&Key::of(&setting.matrix)).unwrap();
        let wide = plan.proposals(64).unwrap()[1];
        assert!(plan.proposals(2).unwrap().iter().all(|algorithm| *algorithm != wide));
        plan.fastest = [[wide; 2]; BUCKETS.len()];
        for rows in [2, 3, 64] {
            assert_eq!(setting.product(rows), all[..rows * OUTPUTS * 4], "{rows} rows");
        }
    });
}
