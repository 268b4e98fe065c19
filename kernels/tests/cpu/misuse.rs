//! Calls that violate the contract of `Device` are refused, and the device remains usable.

use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::{Device, DeviceError, KvShape, Norm, WeightType};

use crate::support::{Share, begin, matrix, tensor};

#[test]
fn operands_that_do_not_fit_are_refused() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let weight = matrix(&mut device, WeightType::F32, 8, &[1.0; 32]);
    let (x, narrow) = (tensor(&mut device, 4, &[1.0; 12]), tensor(&mut device, 3, &[1.0; 9]));
    let short = device.vector(&[0.0; 7]).unwrap();
    let (mut out, mut low) = (device.tensor(3, 8).unwrap(), device.tensor(2, 8).unwrap());
    let refused = |result: Result<(), DeviceError>| {
        assert!(matches!(result, Err(DeviceError::Misuse(_))), "{result:?}")
    };
    refused(device.linear(&narrow, &weight, None, &mut out));
    refused(device.linear(&x, &weight, Some(&short), &mut out));
    refused(device.linear(&x, &weight, None, &mut low));
    // `out` has no live rows to add to.
    let mut empty = device.tensor(3, 8).unwrap();
    refused(device.linear_add(&x, &weight, None, &mut empty));
    refused(device.rms_norm(&x, Norm { weight: &short, eps: 1e-6 }, &mut out));
    refused(device.norm_linear(&x, Norm { weight: &short, eps: 1e-6 }, &weight, None, &mut out));
    begin(&mut device, &[Share { tokens: 1, start: 0, pages: Vec::new() }], &[8], &[]);
    let mut embedded = device.tensor(1, 4).unwrap();
    refused(device.embed(&weight, &mut embedded));
    device.linear(&x, &weight, None, &mut out).unwrap();
    assert_eq!(out.values(), [4.0; 24]);
}

#[test]
fn what_cannot_be_had_is_named() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let shape =
        KvShape { layers: 1, kv_heads: 1, head_dim: 32, page_tokens: 16, pages: 4, dtype: WeightType::F32 };
    device.kv_pool(shape).unwrap();
    for wrong in [
        KvShape { page_tokens: 24, ..shape },
        KvShape { page_tokens: 0, ..shape },
        KvShape { head_dim: 20, ..shape },
    ] {
        assert!(matches!(device.kv_pool(wrong), Err(DeviceError::Unsupported(_))));
    }
    let huge = KvShape { pages: usize::MAX / 8, ..shape };
    assert!(matches!(device.kv_pool(huge), Err(DeviceError::OutOfMemory { .. })));
    assert!(matches!(device.tensor(1 << 40, 1 << 20), Err(DeviceError::OutOfMemory { .. })));
    for isa in Isa::ALL {
        assert_eq!(CpuDevice::new(1, isa).is_ok(), isa.available(), "{isa}");
    }
}
