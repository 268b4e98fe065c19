use super::*;
use crate::HostMatrix;

fn pack(dtype: WeightType, pool: &mut ThreadPool, matrices: &[HostMatrix<'_>], paired: bool) -> Matrix {
    Matrix::pack(Form::Stored(dtype), pool, FusedMatrices::new(matrices, paired).unwrap()).unwrap()
}

#[test]
fn fused_matrices_are_stacked_in_panels() {
    // 21 outputs by 5 inputs in two matrices, element (output, input) = 100 * output + input.
    let values: Vec<f32> = (0..21 * 5).map(|i| (100 * (i / 5) + i % 5) as f32).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (top, bottom) = bytes.split_at(13 * 5 * 4);
    let source = |bytes, rows| HostMatrix::new(bytes, WeightType::F32, rows, 5);
    let mut pool = ThreadPool::new(2).unwrap();
    let matrix = pack(WeightType::F32, &mut pool, &[source(top, 13), source(bottom, 8)], false);
    let Elements::Stored(Stored::F32(data)) = &matrix.data else { unreachable!() };
    assert_eq!((matrix.shape.panels(), matrix.shape.steps(), data.len()), (2, 3, 2 * 3 * STEP));
    for output in 0..32 {
        for input in 0..6 {
            let got = data[output / 16 * 3 * STEP + input / 2 * STEP + input % 2 * 16 + output % 16];
            let want = if output < 21 && input < 5 { (100 * output + input) as f32 } else { 0.0 };
            assert_eq!(got, want, "output {output}, input {input}");
        }
    }
}

#[test]
fn whole_blocks_and_remainders_are_packed_alike() {
    // Two whole panels and five outputs. One or three whole blocks of inputs, depending on the element type, and a
    // remainder.
    let (outputs, inputs) = (37, 57);
    let mut pool = ThreadPool::new(2).unwrap();
    for dtype in [WeightType::F32, WeightType::F16, WeightType::Bf16] {
        let size = dtype.bytes();
        // Nearby bytes differ, so that a wrong index changes the result.
        let bytes: Vec<u8> =
            (0..outputs * inputs * size).map(|i| (i % 251) as u8 ^ (i / 251) as u8).collect();
        let source = HostMatrix::new(&bytes, dtype, outputs, inputs);
        let matrix = pack(dtype, &mut pool, &[source], false);
        let (packed, panel) = (matrix.data.bytes(), matrix.shape.steps() * STEP * size);
        assert_eq!(packed.len(), 3 * panel);
        for output in 0..48 {
            for input in 0..58 {
                let index = match dtype {
                    WeightType::Bf16 => output % 16 * 2 + input % 2,
                    _ => input % 2 * 16 + output % 16,
                };
                let got = &packed[output / 16 * panel + (input / 2 * 32 + index) * size..][..size];
                let zeros = [0; 4];
                let want = match output < outputs && input < inputs {
                    true => &bytes[(output * inputs + input) * size..][..size],
                    false => &zeros[..size],
                };
                assert_eq!(got, want, "{dtype:?}, output {output}, input {input}");
            }
        }
    }
}

#[test]
fn a_window_of_a_wider_matrix_is_packed_as_its_copy() {
    // The window has columns `7..50` of 60 and rows `2..37` of 37.
    let (width, rows, columns) = (60, 35, 43);
    let mut pool = ThreadPool::new(2).unwrap();
    for dtype in [WeightType::F32, WeightType::Bf16] {
        let size = dtype.bytes();
        let whole: Vec<u8> = (0..37 * width * size).map(|i| (i % 251) as u8 ^ (i / 251) as u8).collect();
        let (first, end) = ((2 * width + 7) * size, (36 * width + 7 + columns) * size);
        let bytes = &whole[first..end];
        let window = HostMatrix { bytes, dtype, rows, columns, stride: width };
        let copy: Vec<u8> = (0..rows).flat_map(|row| window.row(row).iter().copied()).collect();
        let copied = HostMatrix::new(&copy, dtype, rows, columns);
        let packed = [window, copied].map(|source| pack(dtype, &mut pool, &[source], false));
        assert_eq!(packed[0].data.bytes(), packed[1].data.bytes(), "{dtype:?}");
    }
}

#[test]
fn panels_of_a_pair_alternate() {
    // Two matrices of 17 outputs by 2 inputs. All elements of an output are equal.
    let values: Vec<f32> = (0..34 * 2).map(|i| (i / 2 + 1) as f32).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let (gate, up) = bytes.split_at(17 * 2 * 4);
    let source = |bytes| HostMatrix::new(bytes, WeightType::F32, 17, 2);
    let mut pool = ThreadPool::new(1).unwrap();
    let matrix = pack(WeightType::F32, &mut pool, &[source(gate), source(up)], true);
    let Elements::Stored(Stored::F32(data)) = &matrix.data else { unreachable!() };
    assert_eq!((matrix.shape.panels(), data.len()), (4, 4 * STEP));
    let first_of = |panel: usize| [data[panel * STEP], data[panel * STEP + 1]];
    assert_eq!([0, 1, 2, 3].map(first_of), [[1.0, 2.0], [18.0, 19.0], [17.0, 0.0], [34.0, 0.0]]);
}
