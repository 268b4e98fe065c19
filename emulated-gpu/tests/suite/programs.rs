//! Tests divergence, loops, barriers, calls and memory spaces in small programs, in several orders of warps.

use super::snippet::Bench;
use tutti_emulated_gpu::{Checks, FaultKind, Grid, Module, launch};

/// Start of a kernel. `%t` is the thread's index in the grid, and `%o` the address of its word in the output.
const OPENING: &str = "{ .reg .b32 %r<32>; .reg .b64 %x<16>; .reg .pred %p<8>; .reg .b32 %t; .reg .b64 %o;\n\
    ld.param.u64 %x0, [out]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;\n\
    mad.lo.s32 %t, %r0, %r1, %r2; mad.wide.u32 %o, %t, 4, %x0;\n";

/// Returns the words that `body` stores with `blocks` x `threads` threads. Asserts that three seeded orders and the
/// unseeded one store the same words.
fn words(declarations: &str, body: &str, blocks: u32, threads: u32) -> Vec<u32> {
    let bench =
        Bench::new(&format!("{declarations}.visible .entry k(.param .u64 out)\n{OPENING}{body}\nret; }}"));
    let count = (blocks * threads) as usize;
    let mut found: Option<Vec<u32>> = None;
    for checks in [Checks::default(), Checks::all(1), Checks::all(2), Checks::all(77)] {
        let out = bench.words(&vec![0; count]);
        bench.run(blocks, threads, &[out], &checks).unwrap();
        let words = bench.read(out, count);
        if let Some(found) = &found {
            assert_eq!(*found, words, "{checks:?}");
        }
        found = Some(words);
    }
    found.unwrap()
}

#[test]
fn lanes_leave_a_loop_at_different_times() {
    // Counts the steps of the Collatz sequence that starts at the thread's index + 1.
    let body = "add.u32 %r3, %t, 1; mov.u32 %r4, 0;\n\
        LOOP: setp.eq.u32 %p0, %r3, 1; @%p0 bra DONE;\n\
        and.b32 %r5, %r3, 1; setp.eq.u32 %p1, %r5, 0; @%p1 bra EVEN;\n\
        mad.lo.u32 %r3, %r3, 3, 1; bra NEXT;\n\
        EVEN: shr.u32 %r3, %r3, 1;\n\
        NEXT: add.u32 %r4, %r4, 1; bra LOOP;\n\
        DONE: st.global.u32 [%o], %r4;";
    let expected = (1..=100).map(|start: u64| {
        let (mut n, mut steps) = (start, 0);
        while n != 1 {
            n = if n % 2 == 0 { n / 2 } else { 3 * n + 1 };
            steps += 1;
        }
        steps
    });
    assert_eq!(words("", body, 2, 50), expected.collect::<Vec<_>>());
}

#[test]
fn lanes_meet_after_nested_branches() {
    // After the branches, all lanes vote. If the lanes had not converged, the ballot would have fewer bits.
    let body = "and.b32 %r3, %t, 3; setp.lt.u32 %p0, %r3, 2; @%p0 bra LOW;\n\
        setp.eq.u32 %p1, %r3, 3; @%p1 bra THREE; mov.u32 %r4, 20; bra MEET;\n\
        THREE: mov.u32 %r4, 30; bra MEET;\n\
        LOW: setp.eq.u32 %p1, %r3, 0; @%p1 mov.u32 %r4, 0; @!%p1 mov.u32 %r4, 10;\n\
        MEET: vote.sync.ballot.b32 %r5, %p1, 0xffffffff; add.u32 %r6, %r4, %r5; st.global.u32 [%o], %r6;";
    let found = words("", body, 1, 32);
    let expected: Vec<u32> = (0..32).map(|t: u32| t % 4 * 10 + 0x9999_9999).collect();
    assert_eq!(found, expected);
}

#[test]
fn lanes_that_end_are_not_waited_for() {
    let body = "setp.ge.u32 %p0, %t, 20; @%p0 bra GO; ret;\nGO: activemask.b32 %r3; bar.sync 0;\n\
        shfl.sync.down.b32 %r4, %t, 1, 31, 0xfff00000; st.global.u32 [%o], %r4;";
    let found = words("", body, 1, 32);
    assert_eq!(found[..20], [0; 20]);
    assert_eq!(found[20..], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 31]);
}

#[test]
fn warp_barriers_join_lanes_from_different_places() {
    let body = "mov.u32 %r3, tile; shl.b32 %r4, %t, 2; add.u32 %r4, %r3, %r4; st.shared.u32 [%r4], %t;\n\
        setp.lt.u32 %p0, %t, 16; @%p0 bra LOW;\n\
        bar.warp.sync 0xffffffff; bra READ;\n\
        LOW: bar.warp.sync 0xffffffff;\n\
        READ: xor.b32 %r5, %r4, 64; ld.shared.u32 %r6, [%r5]; st.global.u32 [%o], %r6;";
    let found = words(".shared .align 128 .b8 tile[128];\n", body, 1, 32);
    assert_eq!(found, (0..32).map(|t| t ^ 16).collect::<Vec<u32>>());
}

#[test]
fn blocks_sum_over_shared_memory_between_barriers() {
    let body = "mov.u32 %r3, tile; shl.b32 %r4, %r2, 2; add.u32 %r4, %r3, %r4; st.shared.u32 [%r4], %r2;\n\
        mov.u32 %r5, 64;\n\
        LOOP: bar.sync 0; setp.ge.u32 %p0, %r2, %r5; @%p0 bra SKIP;\n\
        shl.b32 %r6, %r5, 2; add.u32 %r7, %r4, %r6; ld.shared.u32 %r8, [%r7]; ld.shared.u32 %r9, [%r4];\n\
        add.u32 %r9, %r9, %r8; st.shared.u32 [%r4], %r9;\n\
        SKIP: shr.u32 %r5, %r5, 1; setp.ne.u32 %p1, %r5, 0; @%p1 bra LOOP;\n\
        bar.sync 0; ld.shared.u32 %r10, [tile]; st.global.u32 [%o], %r10;";
    assert_eq!(words(".shared .align 4 .b8 tile[512];\n", body, 3, 128), vec![127 * 64; 3 * 128]);
}

#[test]
fn a_lock_inside_a_warp_makes_progress() {
    // The lanes that fail to get the lock jump back to a lower program counter than that of the winner's critical
    // section.
    let body = "TRY: atom.global.cas.b32 %r3, [lock], 0, 1; setp.eq.u32 %p0, %r3, 0; @%p0 bra WON; bra TRY;\n\
        WON: ld.volatile.global.u32 %r4, [sum]; add.u32 %r4, %r4, 1; st.volatile.global.u32 [sum], %r4;\n\
        membar.gl; atom.global.exch.b32 %r5, [lock], 0; st.global.u32 [%o], %r4;";
    let variables = ".global .align 4 .u32 lock = 0;\n.global .align 4 .u32 sum;\n";
    for checks in [Checks::default(), Checks::all(1), Checks::all(2)] {
        let bench =
            Bench::new(&format!("{variables}.visible .entry k(.param .u64 out)\n{OPENING}{body}\nret; }}"));
        let out = bench.words(&[0; 64]);
        bench.run(1, 64, &[out], &checks).unwrap();
        let mut found = bench.read(out, 64);
        found.sort_unstable();
        assert_eq!(found, (1..=64).collect::<Vec<u32>>());
    }
}

#[test]
fn functions_are_called_and_return_early() {
    let declarations = ".func (.param .b32 result) twice(.param .b32 value, .param .align 8 .b8 pair[8])\n\
        { .reg .b32 %r<4>; .reg .pred %p;\n\
        ld.param.b32 %r0, [value]; ld.param.b32 %r1, [pair+4]; setp.gt.u32 %p, %r0, 9; @%p bra BIG;\n\
        add.u32 %r2, %r0, %r0; st.param.b32 [result], %r2; ret;\n\
        BIG: st.param.b32 [result], %r1; ret; }\n";
    let body = "{ .param .b32 a; .param .align 8 .b8 b[8]; .param .b32 z; st.param.b32 [a], %t;\n\
        st.param.b32 [b+0], 1; st.param.b32 [b+4], 99; call.uni (z), twice, (a, b); ld.param.b32 %r3, [z]; }\n\
        st.global.u32 [%o], %r3;";
    let expected: Vec<u32> = (0..12).map(|t| if t > 9 { 99 } else { 2 * t }).collect();
    assert_eq!(words(declarations, body, 1, 12), expected);
}

#[test]
fn local_memory_is_each_threads_own() {
    let body = ".local .align 4 .b8 depot[32]; mov.u64 %x1, depot; cvta.local.u64 %x2, %x1;\n\
        mov.u32 %r3, 0;\n\
        LOOP: mul.wide.u32 %x3, %r3, 4; add.u64 %x4, %x2, %x3; mad.lo.u32 %r4, %t, 8, %r3; st.u32 [%x4], %r4;\n\
        add.u32 %r3, %r3, 1; setp.lt.u32 %p0, %r3, 8; @%p0 bra LOOP;\n\
        and.b32 %r5, %t, 7; mul.wide.u32 %x3, %r5, 4; add.u64 %x4, %x1, %x3; ld.local.u32 %r6, [%x4];\n\
        st.global.u32 [%o], %r6;";
    let expected: Vec<u32> = (0..40).map(|t| t * 8 + t % 8).collect();
    assert_eq!(words("", body, 1, 40), expected);
}

#[test]
fn constants_vectors_and_narrow_types() {
    let declarations =
        ".const .align 16 .b8 table[16] = {1, 2, 3, 4, 255, 254, 128, 0, 9, 0, 0, 0, 8, 0, 0, 0};\n";
    let body = "ld.const.v4.u32 {%r3, %r4, %r5, %r6}, [table]; ld.const.s8 %r7, [table+4]; ld.const.u8 %r8, [table+5];\n\
        mov.u64 %x1, table; cvta.const.u64 %x2, %x1; ld.s16 %r9, [%x2+5];\n\
        add.u32 %r10, %r3, %r5; add.u32 %r10, %r10, %r6; add.u32 %r10, %r10, %r7; add.u32 %r10, %r10, %r8;\n\
        st.global.u32 [%o], %r10;";
    let aligned = body.replace("[%x2+5]", "[%x2+6]");
    let expected = 0x0403_0201 + 9 + 8 - 1 + 254;
    assert_eq!(words(declarations, &aligned, 1, 3), vec![expected; 3]);
}

#[test]
fn atomics_count_every_thread() {
    let body = "atom.global.add.u32 %r3, [sum], 1; red.global.max.s32 [top], %t; atom.global.inc.u32 %r4, [wheel], 6;\n\
        red.global.add.f32 [real], 0f3F000000; st.global.u32 [%o], %r4;";
    let names = ["sum", "top", "wheel", "real"];
    let declarations: String = names.iter().map(|n| format!(".global .align 4 .u32 {n};\n")).collect();
    let text = format!("{declarations}.visible .entry k(.param .u64 out)\n{OPENING}{body}\nret; }}");
    for checks in [Checks::default(), Checks::all(4)] {
        let bench = Bench::new(&text);
        let out = bench.words(&[0; 700]);
        bench.run(7, 100, &[out], &checks).unwrap();
        let value = |name: &str| {
            let variable = bench.module.variables.iter().find(|v| v.name == name).unwrap();
            bench.read(variable.address.unwrap(), 1)[0]
        };
        assert_eq!(value("sum"), 700);
        assert_eq!(value("top"), 699);
        assert_eq!(value("wheel"), 0);
        assert_eq!(f32::from_bits(value("real")), 350.0);
        let found = bench.read(out, 700);
        assert!((0..7).all(|i| found.iter().filter(|&&w| w == i).count() == 100));
    }
}

#[test]
fn copies_arrive_with_zeros_past_their_source() {
    let body = "mov.u32 %r3, tile; shl.b32 %r4, %r2, 4; add.u32 %r4, %r3, %r4; mul.wide.u32 %x1, %r2, 16; add.u64 %x2, %x1, [source];\n";
    assert!(
        Module::decode(&format!(".version 9.0\n.visible .entry k()\n{{ {body} }}")).unwrap().kernels["k"]
            .error
            .is_some()
    );
    let declarations =
        ".global .align 16 .u32 source[8] = {1, 2, 3, 4, 5, 6, 7, 8};\n.shared .align 16 .b8 tile[64];\n";
    let body = "mov.u64 %x3, source; mov.u32 %r3, tile; shl.b32 %r4, %r2, 4; add.u32 %r4, %r3, %r4;\n\
        cp.async.cg.shared.global [%r4], [%x3], 16; cp.async.commit_group;\n\
        cp.async.ca.shared.global [%r4+32], [%x3+16], 16, 12; cp.async.commit_group;\n\
        cp.async.wait_group 1; ld.shared.u32 %r5, [%r4+12];\n\
        cp.async.wait_group 0; ld.shared.u32 %r6, [%r4+40]; ld.shared.u32 %r7, [%r4+44];\n\
        mad.lo.u32 %r8, %r6, 100, %r5; mad.lo.u32 %r8, %r7, 10000, %r8; st.global.u32 [%o], %r8;";
    assert_eq!(words(declarations, body, 1, 2), vec![704; 2]);
}

#[test]
fn dynamic_shared_memory_lies_after_the_static() {
    let text = ".version 9.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 heap[];\n\
        .visible .entry k(.param .u64 out)\n{ .shared .align 4 .b8 small[20]; .reg .b32 %r<4>; .reg .b64 %x;\n\
        ld.param.u64 %x, [out]; mov.u32 %r0, heap; mov.u32 %r1, small; sub.u32 %r2, %r0, %r1; st.global.u32 [%x], %r2;\n\
        mov.u32 %r3, %dynamic_smem_size; st.shared.u32 [heap+28], %r3; ret; }";
    let module = Module::decode(text).unwrap();
    let bench = Bench { module, memory: tutti_emulated_gpu::DeviceMemory::watched(1 << 20) };
    let kernel = &bench.module.kernels["k"];
    assert_eq!(kernel.error, None);
    let out = bench.words(&[0]);
    let run = |dynamic_shared_bytes: u32| {
        let grid = Grid { blocks: [1; 3], threads: [1; 3], dynamic_shared_bytes };
        launch(&bench.module, kernel, &grid, &out.to_le_bytes(), &bench.memory, &Checks::default())
    };
    run(32).unwrap();
    assert_eq!(bench.read(out, 1), [32]);
    assert_eq!(run(28).unwrap_err().kind, FaultKind::OutOfBounds);
}

#[test]
fn grids_have_three_axes() {
    let text = ".visible .entry k(.param .u64 out)\n{ .reg .b32 %r<16>; .reg .b64 %x<2>;\n\
        mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; mov.u32 %r5, %ctaid.z;\n\
        mov.u32 %r6, %nctaid.y; mad.lo.u32 %r7, %r5, %r6, %r4; mov.u32 %r6, %nctaid.x; mad.lo.u32 %r7, %r7, %r6, %r3;\n\
        mov.u32 %r6, %ntid.z; mad.lo.u32 %r7, %r7, %r6, %r2; mov.u32 %r6, %ntid.y; mad.lo.u32 %r7, %r7, %r6, %r1;\n\
        mov.u32 %r6, %ntid.x; mad.lo.u32 %r7, %r7, %r6, %r0; ld.param.u64 %x0, [out]; mad.wide.u32 %x1, %r7, 4, %x0;\n\
        st.global.u32 [%x1], %r7; ret; }";
    let bench = Bench::new(text);
    let grid = Grid { blocks: [2, 3, 2], threads: [3, 5, 4], dynamic_shared_bytes: 0 };
    let out = bench.words(&vec![u32::MAX; 720]);
    launch(
        &bench.module,
        &bench.module.kernels["k"],
        &grid,
        &out.to_le_bytes(),
        &bench.memory,
        &Checks::all(9),
    )
    .unwrap();
    assert_eq!(bench.read(out, 720), (0..720).collect::<Vec<u32>>());
}

#[test]
fn parameters_are_read_at_computed_offsets() {
    let text = ".visible .entry k(.param .u64 out, .param .align 8 .b8 table[32])\n{ .reg .b32 %r<4>; .reg .b64 %x<8>;\n\
        ld.param.u64 %x0, [out]; mov.u32 %r0, %tid.x; mad.wide.u32 %x1, %r0, 4, %x0; mov.b64 %x2, table;\n\
        and.b32 %r1, %r0, 3; mul.wide.u32 %x3, %r1, 8; add.u64 %x4, %x2, %x3; ld.param.u64 %x5, [%x4];\n\
        cvta.param.u64 %x6, %x4; ld.u64 %x7, [%x6]; add.u64 %x5, %x5, %x7; cvt.u32.u64 %r2, %x5; st.global.u32 [%x1], %r2; ret; }";
    let bench = Bench::new(text);
    let out = bench.words(&[0; 32]);
    bench.run(1, 32, &[out, 10, 20, 30, 40], &Checks::all(3)).unwrap();
    assert_eq!(bench.read(out, 32), (0..32).map(|t| 20 * (t % 4 + 1)).collect::<Vec<u32>>());
}

#[test]
fn lanes_that_wait_for_each_other_in_loops_make_progress() {
    // The upper lanes loop at `WAIT` until the lower lanes have stored `second`. The lower lanes loop at `SPIN` until
    // the upper lanes have stored `first`.
    let body = "setp.lt.u32 %p0, %t, 16; @%p0 bra LOW;\n\
        WAIT: ld.volatile.global.u32 %r3, [second]; setp.eq.u32 %p1, %r3, 0; @%p1 bra WAIT;\n\
        st.volatile.global.u32 [first], 1; bra DONE;\n\
        LOW: st.volatile.global.u32 [second], 1;\n\
        SPIN: ld.volatile.global.u32 %r3, [first]; setp.eq.u32 %p1, %r3, 0; @%p1 bra SPIN;\n\
        DONE: st.global.u32 [%o], %t;";
    let variables = ".global .align 4 .u32 first = 0;\n.global .align 4 .u32 second = 0;\n";
    assert_eq!(words(variables, body, 1, 32), (0..32).collect::<Vec<u32>>());
}
