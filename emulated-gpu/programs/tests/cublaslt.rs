//! Tests `libcublasLt` through the unmodified cudarc. Compares matrix products in all forms with plain sums, and checks
//! refused calls.
#![allow(clippy::unwrap_used)]

mod fixture;

use std::ffi::c_void;

use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys as lt_sys;
use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr};
use fixture::Device;
use half::{bf16, f16};
use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
use lt_sys::cublasStatus_t as Status;
use lt_sys::cudaDataType_t as Type;
use tutti_emulated_programs::Gpus;

/// A 16-bit number in device memory. cudarc's feature for such types is off, because only tests would need it. The
/// feature would make test builds recompile every package that depends on cudarc.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct Half<T>(T);

// SAFETY: `Half<f16>` is one 16-bit number without padding.
unsafe impl DeviceRepr for Half<f16> {}
// SAFETY: `Half<bf16>` is one 16-bit number without padding.
unsafe impl DeviceRepr for Half<bf16> {}

/// Returns small integers. Every element type represents their products and sums exactly.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 5 + seed * 3) % 7) as f32 - 3.0).collect()
}

/// An element type of the library.
trait Element: DeviceRepr + Copy + Default {
    const TYPE: Type;
    fn of(value: f32) -> Self;
    fn value(self) -> f32;
}

macro_rules! element {
    ($kind:ty, $code:ident, $of:expr, $value:expr) => {
        impl Element for $kind {
            const TYPE: Type = Type::$code;
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn value(self) -> f32 {
                $value(self)
            }
        }
    };
}
element!(f32, CUDA_R_32F, |x| x, |x| x);
element!(Half<f16>, CUDA_R_16F, |x| Half(f16::from_f32(x)), |x: Self| x.0.to_f32());
element!(Half<bf16>, CUDA_R_16BF, |x| Half(bf16::from_f32(x)), |x: Self| x.0.to_f32());

/// A matrix product D = alpha op(A) op(B) + beta C. All matrices are in column order or, if `row_order` is true, in row
/// order.
#[derive(Clone, Copy, Debug)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    transpose: [bool; 2],
    row_order: bool,
    /// Number of unused elements between two columns (or rows, in row order).
    gap: usize,
    batch: usize,
    alpha: f32,
    beta: f32,
    bias: bool,
}

const PLAIN: Product = Product {
    m: 5,
    n: 3,
    k: 19,
    transpose: [false, false],
    row_order: false,
    gap: 0,
    batch: 1,
    alpha: 1.0,
    beta: 0.0,
    bias: false,
};

/// Rows, columns and leading dimension of a stored matrix.
#[derive(Clone, Copy)]
struct Stored {
    rows: usize,
    columns: usize,
    leading: usize,
    row_order: bool,
}

impl Stored {
    fn new(product: &Product, rows: usize, columns: usize, transposed: bool) -> Self {
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        let line = if product.row_order { columns } else { rows };
        Stored { rows, columns, leading: line + product.gap, row_order: product.row_order }
    }

    fn elements(&self) -> usize {
        self.leading * if self.row_order { self.rows } else { self.columns }
    }

    fn at(&self, row: usize, column: usize) -> usize {
        if self.row_order { row * self.leading + column } else { column * self.leading + row }
    }
}

fn address<T>(device: &Device, slice: &CudaSlice<T>) -> u64 {
    slice.device_ptr(&device.stream).0
}

fn pointer(address: u64) -> *const c_void {
    std::ptr::without_provenance(address as usize)
}

/// Sets an attribute of a description.
fn set<T>(
    description: lt_sys::cublasLtMatmulDesc_t,
    attribute: Attribute,
    value: &T,
) -> Result<(), lt::CublasError> {
    // SAFETY: callers pass a description that they have not destroyed. `value` has `size_of::<T>()` bytes.
    unsafe {
        lt::set_matmul_desc_attribute(
            description,
            attribute,
            std::ptr::from_ref(value).cast(),
            size_of::<T>(),
        )
    }
}

fn layout(kind: Type, stored: Stored, batch: usize) -> lt_sys::cublasLtMatrixLayout_t {
    let made =
        lt::create_matrix_layout(kind, stored.rows as u64, stored.columns as u64, stored.leading as i64)
            .unwrap();
    let set = |attribute, value: *const c_void, bytes| {
        // SAFETY: `made` is not destroyed before `layout` returns. Each call passes the size of its value in bytes.
        unsafe { lt::set_matrix_layout_attribute(made, attribute, value, bytes) }.unwrap();
    };
    use lt_sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let (order, batch, stride) = (i32::from(stored.row_order), batch as i32, stored.elements() as i64);
    set(Attribute::CUBLASLT_MATRIX_LAYOUT_ORDER, std::ptr::from_ref(&order).cast(), 4);
    set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, std::ptr::from_ref(&batch).cast(), 4);
    set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, std::ptr::from_ref(&stride).cast(), 8);
    made
}

/// Computes a matrix product on the device and with plain loops on the host. Compares every element of D, and the gaps
/// between the lines of D.
fn check<T: Element, R: Element>(device: &Device, product: Product) {
    let Product { m, n, k, batch, .. } = product;
    let a = Stored::new(&product, m, k, product.transpose[0]);
    let b = Stored::new(&product, k, n, product.transpose[1]);
    let d = Stored::new(&product, m, n, false);
    let (a_values, b_values) = (numbers(a.elements() * batch, 1), numbers(b.elements() * batch, 2));
    let (d_values, bias_values) = (numbers(d.elements() * batch, 3), numbers(m, 4));
    let to_device = |values: &[f32]| {
        device.stream.clone_htod(&values.iter().map(|x| T::of(*x)).collect::<Vec<T>>()).unwrap()
    };
    let result_to_device = |values: &[f32]| {
        device.stream.clone_htod(&values.iter().map(|x| R::of(*x)).collect::<Vec<R>>()).unwrap()
    };
    let (a_device, b_device) = (to_device(&a_values), to_device(&b_values));
    let (d_device, bias) = (result_to_device(&d_values), result_to_device(&bias_values));

    let handle = lt::create_handle().unwrap();
    let compute = lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let description = lt::create_matmul_desc(compute, Type::CUDA_R_32F).unwrap();
    set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(product.transpose[0])).unwrap();
    set(description, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(product.transpose[1])).unwrap();
    if product.bias {
        let epilogue = lt_sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue).unwrap();
        set(description, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address(device, &bias)).unwrap();
    }
    let (a_layout, b_layout) = (layout(T::TYPE, a, batch), layout(T::TYPE, b, batch));
    let d_layout = layout(R::TYPE, d, batch);
    let preference = lt::create_matmul_pref().unwrap();
    // SAFETY: the handle and the descriptors are destroyed only at the end of `check`. Each operand has the size that
    // its layout states.
    unsafe {
        let found = lt::get_matmul_algo_heuristic(
            handle,
            description,
            a_layout,
            b_layout,
            d_layout,
            d_layout,
            preference,
        );
        let found = found.unwrap();
        lt::matmul(
            handle,
            description,
            std::ptr::from_ref(&product.alpha).cast(),
            std::ptr::from_ref(&product.beta).cast(),
            pointer(address(device, &a_device)),
            a_layout,
            pointer(address(device, &b_device)),
            b_layout,
            pointer(address(device, &d_device)),
            d_layout,
            pointer(address(device, &d_device)).cast_mut(),
            d_layout,
            &found.algo,
            std::ptr::null_mut(),
            0,
            device.stream.cu_stream().cast(),
        )
        .unwrap();
    }
    let got: Vec<f32> = device.stream.clone_dtoh(&d_device).unwrap().into_iter().map(R::value).collect();
    let mut expected = d_values.clone();
    for batch in 0..batch {
        for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
            let element = |stored: Stored, values: &[f32], transposed, row, column| {
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                values[batch * stored.elements() + stored.at(row, column)]
            };
            let sum: f32 = (0..k)
                .map(|i| {
                    element(a, &a_values, product.transpose[0], row, i)
                        * element(b, &b_values, product.transpose[1], i, column)
                })
                .sum();
            let at = batch * d.elements() + d.at(row, column);
            let bias = if product.bias { bias_values[row] } else { 0.0 };
            expected[at] = product.alpha * sum + product.beta * d_values[at] + bias;
        }
    }
    assert_eq!(got, expected, "{product:?}");
    // SAFETY: each object is destroyed once and is not used afterwards.
    unsafe {
        for layout in [a_layout, b_layout, d_layout] {
            lt::destroy_matrix_layout(layout).unwrap();
        }
        lt::destroy_matmul_pref(preference).unwrap();
        lt::destroy_matmul_desc(description).unwrap();
        lt::destroy_handle(handle).unwrap();
    }
}

#[test]
fn products_equal_plain_sums_in_every_form() {
    Gpus::new(1).with("EMULATED_GPU_CHECKS", "all").run("products_equal_plain_sums_in_every_form", |_| {
        let device = Device::open();
        for transpose in [[false, false], [false, true], [true, false], [true, true]] {
            for (row_order, gap, batch) in
                [(false, 0, 1), (false, 3, 1), (true, 0, 1), (true, 2, 3), (false, 1, 2)]
            {
                let product = Product { transpose, row_order, gap, batch, ..PLAIN };
                check::<f32, f32>(&device, product);
                check::<Half<bf16>, Half<bf16>>(&device, product);
                check::<Half<f16>, Half<f16>>(&device, product);
                check::<Half<bf16>, f32>(&device, product);
                check::<Half<f16>, f32>(&device, product);
                check::<f32, f32>(&device, Product { alpha: 0.5, beta: 2.0, bias: true, ..product });
            }
        }
    });
}

#[test]
fn a_product_runs_in_its_streams_order() {
    let gpus = Gpus::new(1).with("EMULATED_GPU_SEED", 7);
    gpus.run("a_product_runs_in_its_streams_order", |_| {
        let device = Device::open();
        // With a seed, the copies of the operands and the matrix product run as late as allowed. `check` waits only for
        // the result.
        for _ in 0..4 {
            check::<Half<bf16>, f32>(&device, Product { transpose: [true, false], beta: 1.0, ..PLAIN });
        }
    });
}

#[test]
fn what_the_library_cannot_do_is_not_supported() {
    Gpus::new(1).run("what_the_library_cannot_do_is_not_supported", |_| {
        let _device = Device::open();
        let compute = lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = lt::create_matmul_desc(compute, Type::CUDA_R_32F).unwrap();
        let unknown = set(description, Attribute::CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, &0_u64);
        assert_eq!(unknown.unwrap_err().0, Status::CUBLAS_STATUS_NOT_SUPPORTED);

        let handle = lt::create_handle().unwrap();
        let stored = Stored { rows: 4, columns: 4, leading: 4, row_order: false };
        let preference = lt::create_matmul_pref().unwrap();
        let ask = |kind: Type| {
            let layout = layout(kind, stored, 1);
            // SAFETY: the handle and the descriptors exist: this test destroys none of them.
            unsafe {
                lt::get_matmul_algo_heuristic(handle, description, layout, layout, layout, layout, preference)
            }
            .map(drop)
        };
        ask(Type::CUDA_R_16BF).unwrap();
        for kind in [Type::CUDA_R_64F, Type::CUDA_R_8I, Type::CUDA_C_32F] {
            assert_eq!(ask(kind).unwrap_err().0, Status::CUBLAS_STATUS_NOT_SUPPORTED, "{kind:?}");
        }
        let gelu = lt_sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU;
        set(description, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &gelu).unwrap();
        assert_eq!(ask(Type::CUDA_R_16BF).unwrap_err().0, Status::CUBLAS_STATUS_NOT_SUPPORTED);
    });
}

#[test]
fn an_operand_that_is_too_short_is_a_sticky_illegal_address() {
    let test = "an_operand_that_is_too_short_is_a_sticky_illegal_address";
    let report = Gpus::new(1).run(test, |_| {
        let device = Device::open();
        let short = device.stream.alloc_zeros::<f32>(15).unwrap();
        let d = device.stream.alloc_zeros::<f32>(16).unwrap();
        let handle = lt::create_handle().unwrap();
        let compute = lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = lt::create_matmul_desc(compute, Type::CUDA_R_32F).unwrap();
        let layout =
            layout(Type::CUDA_R_32F, Stored { rows: 4, columns: 4, leading: 4, row_order: false }, 1);
        let call = |a: *const c_void| {
            let (one, zero) = (1.0_f32, 0.0_f32);
            let d = pointer(address(&device, &d));
            // SAFETY: the library refuses the wrong operand. With a null algorithm, the library chooses one.
            let status = unsafe {
                lt_sys::cublasLtMatmul(
                    handle,
                    description,
                    std::ptr::from_ref(&one).cast(),
                    a,
                    layout,
                    d,
                    layout,
                    std::ptr::from_ref(&zero).cast(),
                    d,
                    layout,
                    d.cast_mut(),
                    layout,
                    std::ptr::null(),
                    std::ptr::null_mut(),
                    0,
                    device.stream.cu_stream().cast(),
                )
            };
            status.result()
        };
        // `u128` is aligned to 16 bytes like an operand, so the missing allocation is the only error.
        let host = [0_u128; 4];
        assert_eq!(call(host.as_ptr().cast()).unwrap_err().0, Status::CUBLAS_STATUS_INVALID_VALUE);
        call(pointer(address(&device, &short))).unwrap();
        let sticky = fixture::error(device.stream.synchronize());
        assert_eq!(sticky, cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    assert!(report.contains("cublasLtMatmul (A)"), "{report}");
}
