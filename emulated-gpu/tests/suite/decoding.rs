//! Tests that the decoder's error names an unknown opcode or name, and that only kernels with such an error fail.

use super::snippet::HEADER;
use tutti_emulated_gpu::{Checks, DeviceMemory, FaultKind, Grid, Module, launch};

fn error(body: &str) -> String {
    let text = format!(
        "{HEADER}.visible .entry good() {{ ret; }}\n.visible .entry bad() {{ .reg .b32 %r<9>; .reg .b64 %x<9>; .reg .f64 %d<4>; .reg .pred %p<4>;\n{body}\nret; }}\n"
    );
    let module = Module::decode(&text).unwrap();
    let grid = Grid { blocks: [1; 3], threads: [32, 1, 1], dynamic_shared_bytes: 0 };
    let memory = DeviceMemory::new(1 << 20);
    let run = |name: &str| launch(&module, &module.kernels[name], &grid, &[], &memory, &Checks::default());
    run("good").unwrap();
    assert!(module.kernels["bad"].error.is_some(), "{body} is accepted");
    let fault = run("bad").unwrap_err();
    assert_eq!(fault.kind, FaultKind::Unsupported, "{body}");
    let error = module.kernels["bad"].error.as_ref().unwrap();
    assert_eq!(error.line, 6, "{body}: {error}");
    assert!(fault.what.contains(&error.what));
    error.what.clone()
}

#[test]
fn unknown_instructions_and_modifiers_are_named() {
    for instruction in [
        "frobnicate.b32 %r0, %r1;",
        "wgmma.fence.sync.aligned;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r0, %r1, %r2, %r3}, %x0, %x1, 1, 1, 1, 0, 0;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r0], [%x0, {%r1, %r2}], [%r3];",
        "mbarrier.init.shared.b64 [%r0], 1;",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r0,%r1,%r2,%r3}, {%r0,%r1,%r2,%r3}, {%r0,%r1}, {%r0,%r1,%r2,%r3};",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0,%r1}, {%r0,%r1,%r2,%r3}, {%r0,%r1}, {%r0,%r1};",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r0], {%r1};",
        "add.cc.u32 %r0, %r1, %r2;",
        "add.approx.f32 %r0, %r1, %r2;",
        "add.rna.f32 %r0, %r1, %r2;",
        "fma.f32 %r0, %r1, %r2, %r3;",
        "div.f32 %r0, %r1, %r2;",
        "div.rn.sat.f32 %r0, %r1, %r2;",
        "ex2.f32 %r0, %r1;",
        "add.rz.f64 %d0, %d1, %d2;",
        "shl.sat.b32 %r0, %r1, %r2;",
        "cvt.f32.s32 %r0, %r1;",
        "cvt.rni.f32.s32 %r0, %r1;",
        "cvt.rn.satfinite.e5m2x2.f32 %r0, %r1, %r2;",
        "cvt.f16.f32 %r0, %r1;",
        "setp.foo.u32 %p0, %r1, %r2;",
        "setp.lt.b32 %p0, %r1, %r2;",
        "setp.lt.ftz.u32 %p0, %r1, %r2;",
        "ld.global.foo.u32 %r0, [%x0];",
        "ld.shared::cluster.u32 %r0, [%x0];",
        "ld.global.v8.u32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%x0];",
        "atom.global.add.noftz.f16 %r0, [%x0], %r1;",
        "atom.global.xor.u32 %r0, [%x0], %r1;",
        "red.async.add.u32 [%x0], %r1;",
        "shfl.bfly.b32 %r0, %r1, 1, 31;",
        "shfl.sync.foo.b32 %r0, %r1, 1, 31, -1;",
        "vote.ballot.b32 %r0, %p0;",
        "redux.sync.mul.s32 %r0, %r1, -1;",
        "bar.arrive 1, 64;",
        "bar.sync 1, 64;",
        "barrier.cta.red.popc.aligned.u32 %r0, 0, %p0;",
        "membar.foo;",
        "brx.idx %r0, targets;",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%x0];",
        "cp.async.cg.shared.global [%r0], [%x0], 8;",
        "griddepcontrol.wait;",
        "setmaxnreg.inc.sync.aligned.u32 240;",
    ] {
        let mnemonic = instruction.split([' ', ';']).next().unwrap();
        let what = error(instruction);
        assert!(what.contains(mnemonic), "{instruction}: {what}");
    }
}

#[test]
fn wrong_operands_are_errors() {
    assert!(error("add.u32 %r0, %x1, %r2;").contains("`%x1` has 64 bits"));
    assert!(error("add.u32 %r0, %r77, %r2;").contains("`%r77` is not known"));
    assert!(error("add.u32 %r0, %r1;").contains("1 sources, not 2"));
    assert!(error("bra NOWHERE;").contains("`NOWHERE` is not declared"));
    assert!(error("ld.global.u32 %r0, [nothing];").contains("`nothing` is not declared"));
    assert!(error("call nowhere;").contains("`nowhere` is not in this module"));
    assert!(error("mov.b32 {%r0, %r1}, %x1;").contains("64 bits"));
    assert!(error("?").contains('?'));
}

#[test]
fn text_that_is_no_ptx_is_an_error_with_its_line() {
    let error = Module::decode("\n\nint main() {}").unwrap_err();
    assert_eq!(error.line, 3);
    assert!(error.to_string().contains("`int`"), "{error}");
    assert!(Module::decode(".visible .entry k() { ret;").is_err());
    assert!(Module::decode("/* no end").is_err());
    assert!(Module::decode("").unwrap().kernels.is_empty());
}
