//! Tests the loading and the launch of kernels on the emulated GPU, each test in a process of its own. The PTX is
//! written here and needs no compiler.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::result::module;
use cudarc::driver::sys;
use tutti_emulated_programs::Gpus;

use super::{Grid, Kernels, load_kernel};
use crate::DeviceError;
use crate::cuda::arguments::{Argument, Arguments};
use crate::cuda::context::Gpu;
use crate::cuda::parameters;
use crate::cuda::sources::{DeclaredKernel, Kernel};

/// A kernel that takes a pointer, a word, a float and two more words, and stores the last word at the pointer.
const PTX: &str = "\
.version 9.0
.target sm_90
.address_size 64

.visible .entry store(
\t.param .u64 store_param_0,
\t.param .u32 store_param_1,
\t.param .f32 store_param_2,
\t.param .u32 store_param_3
)
.maxntid 64, 1, 1
{
\t.reg .b32 %r<2>;
\t.reg .b64 %rd<3>;

\tld.param.u64 %rd1, [store_param_0];
\tld.param.u32 %r1, [store_param_3];
\tcvta.to.global.u64 %rd2, %rd1;
\tst.global.u32 [%rd2], %r1;
\tret;
}
";

const fn argument(name: &'static str, bytes: usize) -> Argument {
    Argument { name, offset: 0, bytes }
}

const OUT: Argument = argument("out", 8);
const ROWS: Argument = argument("rows", 4);
const SCALE: Argument = argument("scale", 4);
const VALUE: Argument = argument("value", 4);

fn declared(arguments: &'static [Argument]) -> DeclaredKernel {
    DeclaredKernel { name: "store", arguments }
}

/// A GPU, and the module of `PTX` on it.
fn loaded() -> (Arc<Gpu>, sys::CUmodule) {
    let gpu = Gpu::open(0).unwrap();
    let image = CString::new(PTX).unwrap();
    // SAFETY: the image is PTX that ends with a NUL.
    let module = unsafe { module::load_data(image.as_ptr().cast()) }.unwrap();
    (gpu, module)
}

#[test]
fn kernels_that_take_other_arguments_than_those_declared_are_refused() {
    let name = "cuda::kernels::tests::kernels_that_take_other_arguments_than_those_declared_are_refused";
    Gpus::new(1).run(name, |_| {
        let (_gpu, module) = loaded();
        let by_text = parameters::of_ptx(PTX).unwrap();
        let by_driver = HashMap::new();
        // In the second case there is no PTX text, as with a cubin, so the parameters come from the driver.
        for of_source in [&by_text, &by_driver] {
            let load = |arguments| {
                let kernel = declared(arguments);
                match of_source.get(kernel.name) {
                    Some(widths) => parameters::check(&kernel, widths),
                    None => load_kernel(module, &kernel, of_source).map(drop),
                }
            };
            load(&[OUT, ROWS, SCALE, VALUE]).unwrap();
            assert_eq!(
                load(&[OUT, ROWS, SCALE]).unwrap_err(),
                "argument 3 of the kernel store has 4 bytes, and none is declared"
            );
            assert_eq!(
                load(&[OUT, ROWS, SCALE, VALUE, ROWS]).unwrap_err(),
                "argument 4 of the kernel store is missing, and 4 bytes are declared (rows)"
            );
            assert_eq!(
                load(&[OUT, OUT, SCALE, VALUE]).unwrap_err(),
                "argument 1 of the kernel store has 4 bytes, and 8 are declared (out)"
            );
        }
        let absent = DeclaredKernel { name: "absent", arguments: &[] };
        let error = load_kernel(module, &absent, &by_driver).err().unwrap();
        assert!(error.contains("absent"), "{error}");
    });
}

/// The arguments of `store`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fill {
    out: u64,
    rows: u32,
    scale: f32,
    value: u32,
}

// SAFETY: the list holds the offset and the width of each field, in the order of the fields.
unsafe impl Arguments for Fill {
    const LIST: &'static [Argument] = &[
        Argument { offset: 0, ..OUT },
        Argument { offset: 8, ..ROWS },
        Argument { offset: 12, ..SCALE },
        Argument { offset: 16, ..VALUE },
    ];
}

#[test]
fn a_launch_passes_each_argument_and_refuses_grids_beyond_the_limits() {
    let name = "cuda::kernels::tests::a_launch_passes_each_argument_and_refuses_grids_beyond_the_limits";
    Gpus::new(1).run(name, |_| {
        let (gpu, module) = loaded();
        let loaded = load_kernel(module, &declared(Fill::LIST), &HashMap::new()).unwrap();
        let kernels = Kernels { gpu: gpu.clone(), modules: vec![module], loaded: vec![loaded] };
        let kernel = Kernel::<Fill>::declared(0, "store");
        let out = crate::cuda::memory::DeviceBuffer::zeroed(&gpu, 4, "a word").unwrap();
        let launch = |grid| {
            let out = out.at::<u32>().address();
            kernels.launch(kernel, grid, Fill { out, rows: 1, scale: 2.0, value: 77 })
        };
        let word = || {
            let mut host = crate::cuda::memory::PinnedBuffer::new(&gpu, 4).unwrap();
            out.copy_out(0, 4, &mut host, 0).unwrap();
            gpu.synchronize().unwrap();
            host.bytes().to_vec()
        };
        launch(Grid::of(0, 64)).unwrap();
        assert_eq!(word(), 0u32.to_ne_bytes(), "a grid without blocks runs nothing");
        for (grid, limit) in [
            (Grid::of(1, 0), "blocks of 0 threads, the limit is 64"),
            (Grid::of(1, 65), "blocks of 65 threads, the limit is 64"),
            (Grid { blocks: (1, 65_536), threads: 64, shared_bytes: 0 }, "1 x 65536 blocks"),
            (Grid::of(1 << 31, 64), "2147483648 x 1 blocks"),
            (Grid { blocks: (1, 1), threads: 64, shared_bytes: 49_153 }, "the limit is 49152"),
        ] {
            match launch(grid) {
                Err(DeviceError::Unsupported(why)) => {
                    assert!(why.contains("store") && why.contains(limit), "{why}, wanted {limit}");
                }
                other => panic!("{other:?}, wanted {limit}"),
            }
        }
        launch(Grid::of(1, 64)).unwrap();
        assert_eq!(word(), 77u32.to_ne_bytes());
    });
}
