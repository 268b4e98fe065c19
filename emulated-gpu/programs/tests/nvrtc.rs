//! Tests NVIDIA's NVRTC with the emulated driver. `tests/tools/nvrtc` installs NVRTC. If NVRTC is missing, these tests
//! only print a message.
#![allow(clippy::unwrap_used)]

mod fixture;

use cudarc::driver::{CudaContext, PushKernelArg};
use cudarc::nvrtc::{CompileOptions, compile_ptx_with_opts};
use fixture::{PTX, grid};
use tutti_emulated_programs::{Gpus, nvrtc};

const SOURCE: &str = include_str!("../kernels/kernels.cu");

fn compile(arch: &'static str) -> cudarc::nvrtc::Ptx {
    let options = CompileOptions {
        arch: Some(arch),
        options: vec!["-lineinfo".to_owned()],
        name: Some("kernels.cu".to_owned()),
        ..Default::default()
    };
    compile_ptx_with_opts(SOURCE, options).unwrap()
}

/// Returns the lines of a PTX text, without the lines that name folders.
fn comparable(ptx: &str) -> Vec<&str> {
    ptx.lines().filter(|line| !line.contains(".file")).collect()
}

#[test]
fn the_real_compiler_makes_the_ptx_of_the_tests() {
    if nvrtc().is_none() {
        println!("no NVRTC: not compared");
        return;
    }
    Gpus::new(1).run("the_real_compiler_makes_the_ptx_of_the_tests", |_| {
        assert_eq!(comparable(&compile("compute_80").to_src()), comparable(PTX));
    });
}

#[test]
fn what_the_real_compiler_makes_for_the_device_runs() {
    if nvrtc().is_none() {
        println!("no NVRTC: not run");
        return;
    }
    Gpus::new(1).run("what_the_real_compiler_makes_for_the_device_runs", |_| {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let kernel = context.load_module(compile("compute_90")).unwrap().load_function("reverse").unwrap();
        let mut x = stream.clone_htod(&[1.0_f32, 2.0, 3.0]).unwrap();
        let mut launch = stream.launch_builder(&kernel);
        launch.arg(&mut x).arg(&3_i32);
        // SAFETY: the arguments match the kernel's parameters, and the shared array has room for three values.
        unsafe { launch.launch(cudarc::driver::LaunchConfig { shared_mem_bytes: 12, ..grid(1, 32) }) }
            .unwrap();
        assert_eq!(stream.clone_dtoh(&x).unwrap(), [3.0, 2.0, 1.0]);
    });
}
