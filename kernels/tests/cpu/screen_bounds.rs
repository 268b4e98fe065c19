//! Tests the error bounds with which the screen (int8 copy) of an LM head excludes panels.

use tutti_kernels::cpu::{CpuDevice, inspect};
use tutti_kernels::{Dense, Device, HostMatrix, Linear, Quantize, WeightType};

use crate::support::{Random, bytes, tensor, testable};

/// Compares the differences between the head's logits and the screen's sums with the bounds. The rows have outliers,
/// small numbers, and a few numbers that quantise without an error.
#[test]
fn logits_differ_from_the_sums_of_a_screen_by_less_than_the_bound() {
    let mut random = Random::new(73);
    for isa in testable("bounds of a screen") {
        let mut device = CpuDevice::new(2, isa).unwrap();
        for dtype in [WeightType::F32, WeightType::F16, WeightType::Bf16] {
            for inputs in [1, 40, 128, 1030] {
                let bytes = bytes(dtype, &random.normals(70 * inputs, 0.3));
                let source = HostMatrix::new(&bytes, dtype, 70, inputs);
                let head = device.head_matrix(&[source], Quantize::None).unwrap();
                let screen = inspect::screen(&head).unwrap();
                let mut values = random.normals(4 * inputs, 1.0);
                values[inputs] = 200.0;
                values[2 * inputs..3 * inputs].iter_mut().for_each(|x| *x *= 1e-20);
                values[3 * inputs..].iter_mut().for_each(|x| *x = x.signum());
                let x = tensor(&mut device, inputs, &values);
                let mut products = [(), ()].map(|()| device.tensor(4, 70).unwrap());
                device.linear(Linear::plain(&x, &head), &mut products[0]).unwrap();
                device.linear(Linear::plain(&x, screen), &mut products[1]).unwrap();
                for row in 0..4 {
                    let bounds = inspect::bounds(isa, &head, &x, row).unwrap().unwrap();
                    assert!(bounds.sound);
                    for output in 0..70 {
                        let [logit, sum] = [0, 1].map(|i| f64::from(products[i].values()[row * 70 + output]));
                        let panel = bounds.panels[output / 16];
                        let what = format!("{isa} {dtype:?} {inputs}, row {row}, output {output}");
                        let (off, b) = ((logit - sum).abs(), f64::from(panel.bound));
                        assert!(off <= b, "{what}: {logit} and {sum}, bound {b}");
                        let size = f64::from(panel.size);
                        assert!(b <= 0.1 * size + 1e-17, "{what}: bound {b} of {size}");
                    }
                }
            }
        }
    }
}
