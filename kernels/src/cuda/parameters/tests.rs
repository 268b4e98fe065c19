use std::fmt::Write;

use super::{check, of_ptx};
use crate::cuda::sources::{DeclaredKernel, SOURCES};

/// NVRTC's output for three kernels and a function, shortened.
const PTX: &str = "\
.version 9.0
.target sm_90
.visible .func helper(
\t.param .b64 helper_param_0
)
;
\t// .globl\tnone
.visible .entry none()
{
\tret;
}
.visible .entry scale(
\t.param .u64 .ptr .align 1 scale_param_0,
\t.param .f32 scale_param_1,
\t.param .u32 scale_param_2
)
.maxntid 256, 1, 1
{
\tcall.uni helper, (param0);
\tret;
}
.entry by_value (
\t.param .align 8 .b8 by_value_param_0[24],
\t.param .u8 by_value_param_1
) { ret; }
";

#[test]
fn ptx_says_what_each_kernel_takes() {
    let kernels = of_ptx(PTX).unwrap();
    assert_eq!(kernels.len(), 3);
    assert_eq!(kernels["none"], [0; 0]);
    assert_eq!(kernels["scale"], [8, 4, 4]);
    assert_eq!(kernels["by_value"], [24, 1]);
    let error = of_ptx(".entry odd(.param .wide odd_param_0)").unwrap_err();
    assert!(error.contains("odd") && error.contains(".wide"), "{error}");
    assert!(of_ptx(".entry cut").unwrap_err().contains("cut"));
}

/// PTX of a kernel that takes parameters of these widths.
fn ptx(name: &str, widths: &[usize]) -> String {
    let mut text = format!(".visible .entry {name}(");
    for (index, bytes) in widths.iter().enumerate() {
        let comma = if index == 0 { "" } else { "," };
        write!(text, "{comma}\n\t.param .b{} {name}_param_{index}", 8 * bytes).unwrap();
    }
    text + "\n)\n{\n\tret;\n}\n"
}

#[test]
fn a_kernel_that_takes_other_arguments_is_named_with_the_first_difference() {
    let kernels: Vec<&DeclaredKernel> = SOURCES.iter().flat_map(|source| source.kernels).collect();
    for kernel in kernels {
        let (name, declared) = (kernel.name, kernel.arguments);
        let widths: Vec<usize> = declared.iter().map(|argument| argument.bytes).collect();
        let check = |widths: &[usize]| check(kernel, &of_ptx(&ptx(name, widths)).unwrap()[name]);
        check(&widths).unwrap();
        let last = widths.len() - 1;
        let (field, bytes) = (declared[last].name, declared[last].bytes);
        assert_eq!(
            check(&widths[..last]).unwrap_err(),
            format!(
                "argument {last} of the kernel {name} is missing, and {bytes} bytes are declared ({field})"
            )
        );
        let more = [&widths[..], &[4]].concat();
        assert_eq!(
            check(&more).unwrap_err(),
            format!("argument {} of the kernel {name} has 4 bytes, and none is declared", last + 1)
        );
        for (index, argument) in declared.iter().enumerate() {
            let (mut other, width) = (widths.clone(), 12 - argument.bytes);
            other[index] = width;
            let (bytes, field) = (argument.bytes, argument.name);
            assert_eq!(
                check(&other).unwrap_err(),
                format!(
                    "argument {index} of the kernel {name} has {width} bytes, and {bytes} are declared ({field})"
                )
            );
        }
    }
}
