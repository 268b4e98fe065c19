//! Tests instructions of a whole warp: shuffles at the edges, votes, matches, reductions.

use super::snippet::{Bench, results};
use tutti_emulated_gpu::Checks;

/// Returns the results of 32 lanes. `%a` is the lane's index.
fn lanes(body: &str) -> Vec<u64> {
    let cases: Vec<[u64; 1]> = (0..32).map(|lane| [lane]).collect();
    let cases: Vec<&[u64]> = cases.iter().map(|c| &c[..]).collect();
    results(body, 32, &[32], &cases)
}

/// Returns the lane that each lane read, plus 100 if its predicate is false.
fn shuffle(mode: &str, operand: u32, bounds: u32) -> Vec<u64> {
    lanes(&format!(
        "shfl.sync.{mode}.b32 %t1|%p1, %a, {operand}, {bounds:#x}, 0xffffffff;\nadd.u32 %t2, %t1, 100;\n\
         selp.b32 %o, %t1, %t2, %p1;\n"
    ))
}

fn expected(of: impl Fn(u64) -> u64) -> Vec<u64> {
    (0..32).map(of).collect()
}

#[test]
fn shuffles_stop_at_edges() {
    assert_eq!(shuffle("up", 3, 0), expected(|l| if l < 3 { l + 100 } else { l - 3 }));
    assert_eq!(shuffle("down", 3, 31), expected(|l| if l > 28 { l + 100 } else { l + 3 }));
    assert_eq!(shuffle("bfly", 5, 31), expected(|l| l ^ 5));
    assert_eq!(shuffle("idx", 7, 31), expected(|_| 7));
    // Only the low five bits of the operand have an effect.
    assert_eq!(shuffle("idx", 39, 31), expected(|_| 7));
    assert_eq!(shuffle("down", 32, 31), expected(|l| l));
}

#[test]
fn shuffles_stay_in_segments() {
    // Segments of eight lanes: bits 8 to 12 hold the mask 24. `__shfl_*_sync(.., 8)` uses these bounds.
    let down = 0x1800 | 31;
    assert_eq!(shuffle("down", 3, down), expected(|l| if l % 8 > 4 { l + 100 } else { l + 3 }));
    assert_eq!(shuffle("up", 3, 0x1800), expected(|l| if l % 8 < 3 { l + 100 } else { l - 3 }));
    assert_eq!(shuffle("bfly", 4, down), expected(|l| l ^ 4));
    // A butterfly to a later segment is out of bounds. A butterfly to an earlier segment is not.
    assert_eq!(shuffle("bfly", 8, down), expected(|l| if l & 8 == 0 { l + 100 } else { l - 8 }));
    assert_eq!(shuffle("idx", 10, down), expected(|l| l / 8 * 8 + 2));
    // A clamp inside the segment.
    assert_eq!(shuffle("idx", 6, 0x1800 | 4), expected(|l| l + 100));
}

#[test]
fn shuffles_take_operands_per_lane() {
    let found = lanes("sub.u32 %t1, 31, %a;\nshfl.sync.idx.b32 %o, %a, %t1, 31, 0xffffffff;\n");
    assert_eq!(found, expected(|l| 31 - l));
}

#[test]
fn votes() {
    let odd = "and.b32 %t1, %a, 1;\nsetp.eq.u32 %p1, %t1, 1;\n";
    let vote = |rest: &str| lanes(&format!("{odd}{rest}"));
    assert_eq!(vote("vote.sync.ballot.b32 %o, %p1, 0xffffffff;\n"), expected(|_| 0xaaaa_aaaa));
    assert_eq!(vote("vote.sync.ballot.b32 %o, !%p1, 0xffffffff;\n"), expected(|_| 0x5555_5555));
    let choose =
        |what: &str| vote(&format!("vote.sync.{what}.pred %p2, %p1, 0xffffffff;\nselp.b32 %o, 1, 0, %p2;\n"));
    assert_eq!(choose("any"), expected(|_| 1));
    assert_eq!(choose("all"), expected(|_| 0));
    assert_eq!(choose("uni"), expected(|_| 0));
    // Each half of the warp votes separately.
    let halves = "setp.lt.u32 %p2, %a, 16;\nselp.b32 %t2, 0xffff, 0xffff0000, %p2;\n";
    let found = vote(&format!("{halves}vote.sync.ballot.b32 %o, %p1, %t2;\n"));
    assert_eq!(found, expected(|l| if l < 16 { 0xaaaa } else { 0xaaaa_0000 }));
}

#[test]
fn matches_and_reductions() {
    let found = lanes("and.b32 %t1, %a, 3;\nmatch.any.sync.b32 %o, %t1, 0xffffffff;\n");
    assert_eq!(found, expected(|l| 0x1111_1111 << (l & 3)));
    let all = "match.all.sync.b32 %o|%p1, %t1, 0xffffffff;\n@!%p1 mov.b32 %o, 7;\n";
    assert_eq!(lanes(&format!("mov.b32 %t1, 5;\n{all}")), expected(|_| 0xffff_ffff));
    assert_eq!(lanes(&format!("mov.b32 %t1, %a;\n{all}")), expected(|_| 7));
    let reduce =
        |what: &str| lanes(&format!("sub.s32 %t1, %a, 4;\nredux.sync.{what} %o, %t1, 0xffffffff;\n"))[9];
    assert_eq!(reduce("add.s32"), (0..32u32).sum::<u32>() as u64 - 128);
    assert_eq!(reduce("min.s32"), u64::from(u32::MAX - 3));
    assert_eq!(reduce("max.s32"), 27);
    assert_eq!(reduce("min.u32"), 0);
    assert_eq!(reduce("max.u32"), u64::from(u32::MAX));
    assert_eq!(reduce("or.b32"), u64::from(u32::MAX));
    assert_eq!(reduce("and.b32"), 0);
    // The xor of the values 0 to 27 is 0, and so is the xor of -4 to -1.
    assert_eq!(reduce("xor.b32"), 0);
}

#[test]
fn special_registers() {
    assert_eq!(lanes("mov.u32 %o, %laneid;\n"), expected(|l| l));
    assert_eq!(lanes("mov.u32 %o, %lanemask_lt;\n"), expected(|l| (1 << l) - 1));
    assert_eq!(lanes("mov.u32 %o, %lanemask_le;\n"), expected(|l| (2 << l) - 1));
    assert_eq!(lanes("mov.u32 %o, %lanemask_gt;\n"), expected(|l| 0xffff_ffff & !((2 << l) - 1)));
    assert_eq!(lanes("mov.u32 %o, %lanemask_eq;\n"), expected(|l| 1 << l));
    assert_eq!(lanes("activemask.b32 %o;\n"), expected(|_| 0xffff_ffff));
    assert_eq!(lanes("mov.u32 %o, %ntid.x;\n"), expected(|_| 32));
    assert_eq!(lanes("setp.lt.u32 %p1, %a, 4;\n@%p1 activemask.b32 %o;\n@!%p1 mov.b32 %o, 0;\n")[3], 15);
}

#[test]
fn a_partial_warp_has_its_lanes_only() {
    let bench = Bench::new(
        ".visible .entry k(.param .u64 out)\n{ .reg .b32 %r<4>; .reg .b64 %x<4>; .reg .pred %p;\n\
         ld.param.u64 %x0, [out]; mov.u32 %r0, %tid.x; setp.ge.u32 %p, %r0, 0;\n\
         vote.sync.ballot.b32 %r1, %p, 0xffffffff; mad.wide.u32 %x1, %r0, 4, %x0; st.global.u32 [%x1], %r1; ret; }",
    );
    let out = bench.words(&[0; 20]);
    bench.run(1, 20, &[out], &Checks::all(3)).unwrap();
    assert_eq!(bench.read(out, 20), vec![0xf_ffff; 20]);
}
