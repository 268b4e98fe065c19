use super::*;

#[test]
fn matrices_that_do_not_match_are_refused() {
    let matrix = |bytes, dtype, rows, columns| HostMatrix::new(bytes, dtype, rows, columns);
    let refused = |matrices: &[HostMatrix<'_>], paired| {
        matches!(FusedMatrices::new(matrices, paired), Err(DeviceError::Misuse(_)))
    };
    let good = matrix(&[0; 8], WeightType::F16, 2, 2);
    for bad in [
        matrix(&[0; 8], WeightType::Bf16, 2, 2),
        matrix(&[0; 8], WeightType::F16, 1, 4),
        matrix(&[0; 7], WeightType::F16, 2, 2),
        matrix(&[], WeightType::F16, usize::MAX, 2),
    ] {
        assert!(refused(&[good, bad], false));
    }
    assert!(refused(&[], false));
    for matrices in [&[good][..], &[good, matrix(&[0; 4], WeightType::F16, 1, 2)], &[good; 4]] {
        assert!(refused(matrices, true));
    }
    assert!(!refused(&[good; 2], true));
    // Two rows of one column with a stride of two elements take three elements: no padding follows the last row.
    let window = |bytes, stride| HostMatrix { stride, ..matrix(bytes, WeightType::F16, 2, 1) };
    assert!(!refused(&[window(&[0; 6], 2)], false));
    for bad in [window(&[0; 8], 2), window(&[0; 4], 2), window(&[0; 2], 0), window(&[0; 6], usize::MAX)] {
        assert!(refused(&[bad], false));
    }
}
