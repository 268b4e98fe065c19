//! Tests that a kernel is refused when it is loaded if its parameters differ from the arguments of its launches.

use std::fs;

use tutti_kernels::Device;
use tutti_kernels::cuda::{CudaDevice, KernelCache, compile_all};

use crate::support::cuda;

/// Start of a kernel's text. Its parameters are two pointers, a float, a word and a pointer.
const KERNEL: &str = ".entry rms_norm_f32(";

#[test]
fn a_kernel_with_other_parameters_is_refused_by_its_name() {
    let Some(device) = cuda("a kernel with other parameters") else { return };
    let capability = device.describe().rsplit(' ').next().unwrap().replace('.', "");
    drop(device);
    let folder = tempfile::tempdir().unwrap();
    compile_all(folder.path(), &format!("compute_{capability}")).unwrap();
    let mut files = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let file = files.find(|file| file.to_string_lossy().contains("rms_norm-")).unwrap();
    let ptx = fs::read_to_string(&file).unwrap();
    let (before, kernel) = ptx.split_once(KERNEL).unwrap();
    let (parameters, body) = kernel.split_once(')').unwrap();
    let cache = KernelCache::new(None).with_compiled(Some(folder.path().to_owned()));

    let more = format!("{},\n\t.param .u32 rms_norm_f32_param_5\n", parameters.trim_end());
    let (less, _) = parameters.rsplit_once(',').unwrap();
    let other = parameters.replace(".f32 rms", ".f64 rms");
    for (parameters, wanted) in [
        (&more[..], "argument 5 of the kernel rms_norm_f32 has 4 bytes, and none is declared"),
        (less, "argument 4 of the kernel rms_norm_f32 is missing, and 8 bytes are declared (out)"),
        (&other[..], "argument 2 of the kernel rms_norm_f32 has 8 bytes, and 4 are declared (eps)"),
    ] {
        fs::write(&file, format!("{before}{KERNEL}{parameters}){body}")).unwrap();
        match CudaDevice::open(0, &cache) {
            Ok(_) => panic!("{wanted}: it is loaded"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains(wanted) && error.contains("rms_norm.cu"), "{error}");
            }
        }
    }
    fs::write(&file, ptx).unwrap();
    CudaDevice::open(0, &cache).unwrap();
}
