//! Tests, for each check, that it reports a wrong program and accepts the correct program, in three orders of
//! execution.

use super::snippet::Bench;
use tutti_emulated_gpu::{Checks, DeviceMemory, Fault, FaultKind, Grid, Module, launch};

const OPENING: &str = "{ .reg .b32 %r<32>; .reg .b64 %x<16>; .reg .pred %p<8>; .reg .b32 %t; .reg .b64 %o;\n\
    .loc 1 10 1\n\
    ld.param.u64 %x0, [out]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;\n\
    mad.lo.s32 %t, %r0, %r1, %r2; mad.wide.u32 %o, %t, 4, %x0; mov.u32 %r3, tile; shl.b32 %r4, %r2, 2; add.u32 %r4, %r3, %r4;\n\
    .loc 1 11 1\n";

/// Returns the outcomes of a body in three orders of execution. The output buffer has one word per thread.
fn outcomes(body: &str, blocks: u32, threads: u32) -> Vec<Result<(), Box<Fault>>> {
    let text = format!(
        ".shared .align 128 .b8 tile[1024];\n.global .align 4 .u32 count;\n.visible .entry k(.param .u64 out)\n{OPENING}{body}\nret; }}\n.file 1 \"kernel.cu\"\n"
    );
    let orders = [1, 2, 30].map(|seed| {
        let bench = Bench::new(&text);
        let out = bench.memory.allocate(u64::from(blocks * threads) * 4).unwrap();
        bench.run(blocks, threads, &[out], &Checks::all(seed))
    });
    orders.into()
}

fn silent(body: &str, blocks: u32, threads: u32) {
    for outcome in outcomes(body, blocks, threads) {
        outcome.unwrap();
    }
}

/// Asserts that the body fails in all three orders, with this kind of fault and these words, at a line of the source.
fn fires(body: &str, blocks: u32, threads: u32, kind: FaultKind, words: &str) {
    for outcome in outcomes(body, blocks, threads) {
        let fault = outcome.unwrap_err();
        assert_eq!(fault.kind, kind, "{fault}");
        assert!(fault.what.contains(words), "{fault}");
        assert_eq!(fault.kernel, "k");
        let source = fault.source.as_ref().unwrap();
        assert_eq!((source.file.as_str(), source.line), ("kernel.cu", 11), "{fault}");
        assert!(fault.ptx_line > 5, "{fault}");
    }
}

#[test]
fn bounds_of_allocations() {
    silent("st.global.u32 [%o], %t;", 2, 48);
    fires("st.global.u32 [%o+4], %t;", 2, 48, FaultKind::OutOfBounds, "write of 4 bytes in no allocation");
    fires("st.global.u32 [%o-4], %t;", 2, 48, FaultKind::OutOfBounds, "write of 4 bytes");
    fires("ld.global.u32 %r5, [0];", 1, 1, FaultKind::OutOfBounds, "read of 4 bytes");
    // A vector store whose end is out of bounds.
    fires("st.global.v2.u32 [%x0+8], {%t, %t};", 1, 3, FaultKind::OutOfBounds, "write of 8 bytes");
    // A generic load from an offset in shared memory to which the window's start was not added.
    fires("cvt.u64.u32 %x1, %r4; ld.u32 %r5, [%x1];", 1, 1, FaultKind::OutOfBounds, "read");
}

#[test]
fn the_thread_of_a_fault_is_named() {
    let body = "setp.ne.u32 %p0, %t, 71; @%p0 bra DONE; st.shared.u32 [%r3+2000], %t;\nDONE:";
    for outcome in outcomes(body, 2, 48) {
        let fault = outcome.unwrap_err();
        assert_eq!((fault.block, fault.thread), ([1, 0, 0], [23, 0, 0]), "{fault}");
        assert_eq!(fault.address, Some(2000));
        let text = fault.to_string();
        assert!(
            text.contains("kernel k") && text.contains("kernel.cu:11") && text.contains("thread (23, 0, 0)"),
            "{text}"
        );
    }
}

#[test]
fn use_after_free() {
    let bench = Bench::new(
        ".visible .entry k(.param .u64 out)\n{ .reg .b64 %x; .reg .b32 %r; ld.param.u64 %x, [out]; ld.global.u32 %r, [%x]; ret; }",
    );
    let address = bench.words(&[5]);
    bench.run(1, 32, &[address], &Checks::default()).unwrap();
    bench.memory.free(address).unwrap();
    let fault = bench.run(1, 32, &[address], &Checks::default()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::UseAfterFree, "{fault}");
}

#[test]
fn bounds_of_shared_and_local_memory() {
    silent("st.shared.u32 [%r3+1020], 1;", 1, 1);
    fires("st.shared.u32 [%r3+1024], 1;", 1, 1, FaultKind::OutOfBounds, "1024 bytes of shared memory");
    fires("st.shared.u32 [%r3-4], 1;", 1, 1, FaultKind::OutOfBounds, "shared memory");
    let generic =
        |offset: u32| format!("mov.u64 %x1, tile; cvta.shared.u64 %x2, %x1; st.u32 [%x2+{offset}], 1;");
    silent(&generic(1020), 1, 1);
    fires(&generic(1024), 1, 1, FaultKind::OutOfBounds, "shared memory");
    let local = |offset: u32| format!(".local .align 4 .b8 own[16]; st.local.u32 [own+{offset}], 1;");
    silent(&local(12), 1, 32);
    fires(&local(16), 1, 32, FaultKind::OutOfBounds, "local memory, 16 bytes");
}

#[test]
fn alignment() {
    silent("st.global.v2.u32 [%x0+8], {%t, %t};", 1, 4);
    fires("st.global.v2.u32 [%x0+4], {%t, %t};", 1, 4, FaultKind::Misaligned, "8 bytes is not aligned");
    fires("st.shared.u32 [%r3+2], 1;", 1, 1, FaultKind::Misaligned, "4 bytes");
    fires("atom.global.add.u32 %r5, [%x0+2], 1;", 1, 4, FaultKind::Misaligned, "4 bytes");
    fires("cp.async.cg.shared.global [%r3+8], [%x0], 16;", 1, 4, FaultKind::Uninitialised, "nothing wrote");
}

#[test]
fn reads_of_what_was_never_written() {
    silent("st.global.u32 [%o], 1; ld.global.u32 %r5, [%o];", 2, 40);
    fires("ld.global.u32 %r5, [%o];", 2, 40, FaultKind::Uninitialised, "global memory");
    fires(
        "st.global.u16 [%o], 1; ld.global.u32 %r5, [%o];",
        2,
        40,
        FaultKind::Uninitialised,
        "global memory",
    );
    silent("st.shared.u32 [%r4], 1; ld.shared.u32 %r5, [%r4];", 2, 40);
    fires("ld.shared.u32 %r5, [%r4];", 2, 40, FaultKind::Uninitialised, "shared memory");
    fires("atom.shared.add.u32 %r5, [%r4], 1;", 1, 4, FaultKind::Uninitialised, "shared memory");
    // A block does not see shared memory that an earlier block wrote.
    let second =
        "setp.ne.u32 %p0, %r0, 0; @%p0 bra READ; st.shared.u32 [%r4], 1;\nREAD: ld.shared.u32 %r5, [%r4];";
    fires(second, 2, 32, FaultKind::Uninitialised, "shared memory");
}

#[test]
fn races_between_warps_without_a_barrier() {
    // Each thread reads a word that a thread of the other warp writes.
    let exchange = |between: &str| {
        format!(
            "st.shared.u32 [%r4], %t; {between} xor.b32 %r5, %r4, 128; ld.shared.u32 %r6, [%r5]; st.global.u32 [%o], %r6;"
        )
    };
    silent(&exchange("bar.sync 0;"), 2, 64);
    for outcome in outcomes(&exchange(""), 2, 64) {
        let fault = outcome.unwrap_err();
        // In some orders, the read comes first and finds memory that is not written yet.
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
    }
    // Write after read: without the second barrier, the writes of a round race with the reads of the round before.
    let rounds = |after: &str| {
        format!(
            "mov.u32 %r10, 0;\nLOOP: st.shared.u32 [%r4], %t; bar.sync 0; xor.b32 %r5, %r4, 128; ld.shared.u32 %r6, [%r5]; {after}\n\
             add.u32 %r10, %r10, 1; setp.lt.u32 %p0, %r10, 3; @%p0 bra LOOP; st.global.u32 [%o], %r6;"
        )
    };
    silent(&rounds("bar.sync 0;"), 1, 64);
    fires(&rounds(""), 1, 64, FaultKind::Race, "without a barrier");
    // Two warps write the same word.
    fires("st.shared.u32 [%r3], %t;", 1, 64, FaultKind::Race, "after a write of warp");
    // Atomic operations do not race with each other. They need a barrier after the write of the initial value.
    let atomics = |between: &str| {
        format!(
            "setp.ne.u32 %p0, %r2, 0; @%p0 bra ADD; st.shared.u32 [%r3], 0;\nADD: {between} atom.shared.add.u32 %r5, [%r3], 1;\n"
        )
    };
    silent(&atomics("bar.sync 0;"), 1, 64);
    for outcome in outcomes(&atomics(""), 1, 64) {
        let fault = outcome.unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
    }
}

#[test]
fn races_inside_a_warp() {
    let exchange = |between: &str| {
        format!(
            "st.shared.u32 [%r4], %t; {between} xor.b32 %r5, %r4, 4; ld.shared.u32 %r6, [%r5]; st.global.u32 [%o], %r6;"
        )
    };
    silent(&exchange("bar.warp.sync 0xffffffff;"), 1, 32);
    silent("st.shared.u32 [%r4], %t; ld.shared.u32 %r6, [%r4];", 1, 32);
    fires(&exchange(""), 1, 32, FaultKind::Race, "without __syncwarp");
    let again = |between: &str| {
        format!(
            "st.shared.u32 [%r4], %t; bar.warp.sync 0xffffffff; xor.b32 %r5, %r4, 4; ld.shared.u32 %r6, [%r5]; {between} st.shared.u32 [%r4], %r6;"
        )
    };
    silent(&again("bar.warp.sync 0xffffffff;"), 1, 32);
    fires(&again(""), 1, 32, FaultKind::Race, "after a read of lane");
}

#[test]
fn copies_are_read_after_their_wait() {
    let copy = |wait: &str| {
        format!(
            "mov.u64 %x3, count; st.global.u32 [%o], 3; cp.async.ca.shared.global [%r4], [%o], 4; cp.async.commit_group; {wait}\n\
             ld.shared.u32 %r6, [%r4]; st.global.u32 [%o], %r6;"
        )
    };
    silent(&copy("cp.async.wait_group 0;"), 1, 64);
    silent(&copy("cp.async.wait_all;"), 1, 64);
    fires(&copy(""), 1, 64, FaultKind::Race, "before its cp.async was waited for");
    fires(&copy("cp.async.wait_group 1;"), 1, 64, FaultKind::Race, "before its cp.async was waited for");
    // A read of data that another warp has copied needs a barrier after the other warp's wait.
    let other = |barrier: &str| {
        copy(&format!("cp.async.wait_all; {barrier}"))
            .replace("ld.shared.u32 %r6, [%r4]", "xor.b32 %r5, %r4, 128; ld.shared.u32 %r6, [%r5]")
    };
    silent(&other("bar.sync 0;"), 1, 64);
    for outcome in outcomes(&other(""), 1, 64) {
        let fault = outcome.unwrap_err();
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::Uninitialised), "{fault}");
    }
    fires("cp.async.ca.shared.global [%r3+1024], [count], 4;", 1, 1, FaultKind::OutOfBounds, "cp.async");
    fires("cp.async.ca.shared.global [%r3+2], [count], 4;", 1, 1, FaultKind::Misaligned, "cp.async");
}

#[test]
fn races_of_global_memory_between_blocks() {
    silent("st.global.u32 [%o], %t; ld.global.u32 %r5, [%o];", 4, 32);
    // All blocks write to the first block's words.
    fires(
        "mul.wide.u32 %x1, %r2, 4; add.u64 %x1, %x0, %x1; st.global.u32 [%x1], %t;",
        4,
        32,
        FaultKind::Race,
        "in the same launch",
    );
    silent("mul.wide.u32 %x1, %r2, 4; add.u64 %x1, %x0, %x1; st.global.u32 [%x1], %t;", 1, 32);
    // Atomic operations of different blocks do not race.
    silent("atom.global.add.u32 %r5, [count], 1;", 4, 32);
    // The last block may read the other blocks' results if all blocks use a fence and an atomic counter.
    let last = |fence: &str| {
        format!(
            "st.global.u32 [%o], %t; {fence} atom.global.add.u32 %r5, [count], 1; mov.u32 %r6, %nctaid.x; sub.u32 %r6, %r6, 1;\n\
             rem.u32 %r7, %r5, %r6; setp.ne.u32 %p0, %r5, %r6; @%p0 bra DONE;\n\
             mov.u32 %r8, 0;\nLOOP: mul.wide.u32 %x1, %r8, 4; add.u64 %x1, %x0, %x1; ld.global.u32 %r9, [%x1]; add.u32 %r8, %r8, 1;\n\
             setp.le.u32 %p1, %r8, %r6; @%p1 bra LOOP; st.global.u32 [count], 0;\nDONE:"
        )
    };
    silent(&last("membar.gl;"), 4, 1);
    fires(&last(""), 4, 1, FaultKind::Race, "in the same launch");
}

#[test]
fn barriers_that_not_all_reach() {
    silent("bar.sync 0;", 2, 48);
    let divergent = "setp.lt.u32 %p0, %r2, 7; @%p0 bra SKIP; bar.sync 0;\nSKIP: bar.sync 0;";
    fires(divergent, 1, 32, FaultKind::Barrier, "not all lanes of the warp reach");
    // The warps of a block wait at different barriers.
    let warps = "setp.lt.u32 %p0, %r2, 32; @%p0 bra ONE; bar.sync 2; bra DONE;\nONE: bar.sync 1;\nDONE:";
    for outcome in outcomes(warps, 1, 64) {
        assert_eq!(outcome.unwrap_err().kind, FaultKind::Barrier);
    }
    // One lane never reaches the warp barrier.
    let missing = "setp.eq.u32 %p0, %r2, 3; @%p0 bra SKIP; bar.warp.sync 0xffffffff;\nSKIP: bar.sync 0;";
    fires(missing, 1, 32, FaultKind::Barrier, "not all lanes");
}

#[test]
fn shuffles_of_lanes_that_take_no_part() {
    let low = |rest: &str| format!("setp.ge.u32 %p0, %r2, 16; @%p0 bra DONE; {rest}\nDONE:");
    silent(&low("shfl.sync.bfly.b32 %r5, %t, 1, 31, 0xffff;"), 1, 32);
    fires(&low("shfl.sync.bfly.b32 %r5, %t, 16, 31, 0xffff;"), 1, 32, FaultKind::Barrier, "takes no part");
    fires(&low("shfl.sync.bfly.b32 %r5, %t, 1, 31, 0xff;"), 1, 32, FaultKind::Barrier, "own member mask");
    fires(
        &low("shfl.sync.bfly.b32 %r5, %t, 1, 31, 0xffffffff; bar.sync 0;")
            .replace("\nDONE:", "\nDONE: bar.sync 0;"),
        1,
        32,
        FaultKind::Barrier,
        "not all lanes",
    );
}

#[test]
fn traps() {
    fires("trap;", 1, 1, FaultKind::Trap, "a trap");
}

#[test]
fn parameters_and_grids_that_do_not_fit() {
    let text = ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u32 a, .param .u64 b, .param .align 4 .b8 c[12])\n\
        .maxntid 64, 1, 1\n{ .shared .align 16 .b8 big[4096]; ret; }";
    let module = Module::decode(text).unwrap();
    let kernel = &module.kernels["k"];
    let offsets: Vec<_> = kernel.parameters.iter().map(|p| (p.offset, p.bytes, p.align)).collect();
    assert_eq!(offsets, [(0, 4, 4), (8, 8, 8), (16, 12, 4)]);
    assert_eq!((kernel.static_shared_bytes, kernel.max_threads_per_block), (4096, Some(64)));
    let memory = DeviceMemory::new(1 << 20);
    let run = |blocks, threads, shared, bytes: usize| {
        let grid = Grid { blocks, threads, dynamic_shared_bytes: shared };
        launch(&module, kernel, &grid, &vec![0; bytes], &memory, &Checks::default())
    };
    run([1; 3], [64, 1, 1], 0, 28).unwrap();
    for outcome in [
        run([1; 3], [64, 1, 1], 0, 24),
        run([1; 3], [64, 1, 1], 0, 32),
        run([1; 3], [65, 1, 1], 0, 28),
        run([0, 1, 1], [64, 1, 1], 0, 28),
        run([1, 65_536, 1], [64, 1, 1], 0, 28),
        run([1; 3], [1, 1, 65], 0, 28),
        run([1; 3], [64, 1, 1], 227 * 1024 - 4095, 28),
    ] {
        assert_eq!(outcome.unwrap_err().kind, FaultKind::Launch);
    }
}
