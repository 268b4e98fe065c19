//! Tests each fragment layout of `mma.sync` and `ldmatrix`.
//!
//! The layouts are those in the PTX ISA's tables, with `group = lane / 4` and `t = lane % 4`.

use super::snippet::Bench;
use tutti_emulated_gpu::Checks;

/// Runs `mma.sync` on fragments from memory, and returns D. In memory, the 32 lanes of a register are contiguous.
fn multiply(shape: &str, a: &[Vec<u32>], b: &[Vec<u32>], c: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let names =
        |first: usize, n: usize| (first..first + n).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(", ");
    let mut body = String::new();
    let inputs: Vec<&Vec<u32>> = a.iter().chain(b).chain(c).collect();
    for i in 0..inputs.len() {
        body += &format!("ld.global.u32 %r{i}, [%x2+{}];\n", i * 128);
    }
    let (na, nb) = (a.len(), b.len());
    // The targets are also the first four source registers, because PTX permits this.
    body += &format!(
        "mma.sync.aligned.{shape} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};\n",
        d = names(0, 4),
        a = names(0, na),
        b = names(na, nb),
        c = names(na + nb, 4)
    );
    for i in 0..4 {
        body += &format!("st.global.u32 [%x3+{}], %r{i};\n", i * 128);
    }
    let bench = Bench::new(&format!(
        ".visible .entry k(.param .u64 in, .param .u64 out)\n{{ .reg .b32 %r<16>; .reg .b32 %l; .reg .b64 %x<4>;\n\
         ld.param.u64 %x0, [in]; ld.param.u64 %x1, [out]; mov.u32 %l, %tid.x;\n\
         mad.wide.u32 %x2, %l, 4, %x0; mad.wide.u32 %x3, %l, 4, %x1;\n{body}ret; }}"
    ));
    let input = bench.words(&inputs.into_iter().flatten().copied().collect::<Vec<_>>());
    let output = bench.memory.allocate(4 * 128).unwrap();
    bench.run(1, 32, &[input, output], &Checks::all(5)).unwrap();
    bench.read(output, 128).chunks(32).map(<[u32]>::to_vec).collect()
}

/// Returns a small integer that differs between neighbouring elements, so that a misplaced element shows.
fn element(row: usize, column: usize, salt: usize) -> f32 {
    ((row * 7 + column * 3 + salt) % 11) as f32 - 5.0
}

fn product(m: usize, n: usize, depth: usize) -> f32 {
    (0..depth).map(|k| element(m, k, 1) * element(k, n, 4)).sum::<f32>() + element(m, n, 2)
}

fn pair(narrow: impl Fn(f32) -> u16, low: f32, high: f32) -> u32 {
    u32::from(narrow(low)) | u32::from(narrow(high)) << 16
}

fn brain(x: f32) -> u16 {
    (x.to_bits() >> 16) as u16
}

/// Returns the bits of a small integer as f16.
fn half(x: f32) -> u16 {
    let bits = x.to_bits();
    if x == 0.0 {
        0
    } else {
        (bits >> 16 & 0x8000) as u16 | (((bits & 0x7fff_ffff) - (112 << 23)) >> 13) as u16
    }
}

fn sums() -> Vec<Vec<u32>> {
    let of = |register: usize, lane: usize| {
        let (group, t) = (lane / 4, lane % 4);
        element(group + register / 2 * 8, 2 * t + register % 2, 2).to_bits()
    };
    (0..4).map(|r| (0..32).map(|lane| of(r, lane)).collect()).collect()
}

fn check_sums(found: &[Vec<u32>], depth: usize, name: &str) {
    for (register, lanes) in found.iter().enumerate() {
        for (lane, bits) in lanes.iter().enumerate() {
            let (m, n) = (lane / 4 + register / 2 * 8, 2 * (lane % 4) + register % 2);
            assert_eq!(f32::from_bits(*bits), product(m, n, depth), "{name}: row {m}, column {n}");
        }
    }
}

#[test]
fn halves_in_fragments_of_m16n8k16_and_m16n8k8() {
    for (name, narrow) in [("bf16", brain as fn(f32) -> u16), ("f16", half)] {
        for depth in [16, 8] {
            let tiles = depth / 8;
            let a = |register: usize, lane: usize| {
                let (row, column) = (lane / 4 + register % 2 * 8, 2 * (lane % 4) + register / 2 * 8);
                pair(narrow, element(row, column, 1), element(row, column + 1, 1))
            };
            let b = |register: usize, lane: usize| {
                let (row, column) = (2 * (lane % 4) + register * 8, lane / 4);
                pair(narrow, element(row, column, 4), element(row + 1, column, 4))
            };
            let fragments = |n: usize, of: &dyn Fn(usize, usize) -> u32| -> Vec<Vec<u32>> {
                (0..n).map(|r| (0..32).map(|lane| of(r, lane)).collect()).collect()
            };
            let shape = format!("m16n8k{depth}.row.col.f32.{name}.{name}.f32");
            let found = multiply(&shape, &fragments(2 * tiles, &a), &fragments(tiles, &b), &sums());
            check_sums(&found, depth, &shape);
        }
    }
}

#[test]
fn tensor_floats_in_fragments_of_m16n8k8() {
    // Sets the low 13 bits, which tf32 ignores.
    let dirty = |x: f32| if x == 0.0 { 0 } else { x.to_bits() | 0x1fff };
    let a = |register: usize, lane: usize| {
        dirty(element(lane / 4 + register % 2 * 8, lane % 4 + register / 2 * 4, 1))
    };
    let b = |register: usize, lane: usize| dirty(element(lane % 4 + register * 4, lane / 4, 4));
    let a: Vec<Vec<u32>> = (0..4).map(|r| (0..32).map(|lane| a(r, lane)).collect()).collect();
    let b: Vec<Vec<u32>> = (0..2).map(|r| (0..32).map(|lane| b(r, lane)).collect()).collect();
    let found = multiply("m16n8k8.row.col.f32.tf32.tf32.f32", &a, &b, &sums());
    check_sums(&found, 8, "tf32");
}

/// Loads `count` matrices. The value of each element is 64 * matrix + 8 * row + column.
fn load(count: usize, transposed: bool) -> Vec<Vec<u32>> {
    let registers: Vec<String> = (0..count).map(|i| format!("%r{i}")).collect();
    let trans = if transposed { ".trans" } else { "" };
    let mut body = String::new();
    for i in 0..count {
        body += &format!("st.global.u32 [%x1+{}], %r{i};\n", 128 * i);
    }
    let bench = Bench::new(&format!(
        ".visible .entry k(.param .u64 out)\n{{ .shared .align 16 .b8 tile[512];\n\
         .reg .b32 %r<8>; .reg .b32 %t<8>; .reg .b16 %h; .reg .b64 %x<4>;\n\
         ld.param.u64 %x0, [out]; mov.u32 %t0, %tid.x; mad.wide.u32 %x1, %t0, 4, %x0;\n\
         mov.u32 %t1, tile; mov.u32 %t2, %t0;\n\
         LOOP: .reg .pred %p; cvt.u16.u32 %h, %t2; shl.b32 %t3, %t2, 1; add.u32 %t3, %t3, %t1;\n\
         st.shared.u16 [%t3], %h; add.u32 %t2, %t2, 32; setp.lt.u32 %p, %t2, 256; @%p bra LOOP;\n\
         bar.warp.sync 0xffffffff; shl.b32 %t4, %t0, 4; and.b32 %t4, %t4, {mask}; add.u32 %t4, %t4, %t1;\n\
         ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{list}}}, [%t4];\n{body}ret; }}",
        mask = 128 * count - 1,
        list = registers.join(", ")
    ));
    let out = bench.memory.allocate(128 * count as u64).unwrap();
    bench.run(1, 32, &[out], &Checks::all(7)).unwrap();
    bench.read(out, 32 * count).chunks(32).map(<[u32]>::to_vec).collect()
}

#[test]
fn matrices_are_loaded_by_rows_or_transposed() {
    for count in [1, 2, 4] {
        for (matrix, lanes) in load(count, false).iter().enumerate() {
            for (lane, &bits) in lanes.iter().enumerate() {
                let low = (64 * matrix + 8 * (lane / 4) + 2 * (lane % 4)) as u32;
                assert_eq!(bits, low | (low + 1) << 16, "x{count}, matrix {matrix}, lane {lane}");
            }
        }
        for (matrix, lanes) in load(count, true).iter().enumerate() {
            for (lane, &bits) in lanes.iter().enumerate() {
                let low = (64 * matrix + 8 * (2 * (lane % 4)) + lane / 4) as u32;
                assert_eq!(bits, low | (low + 8) << 16, "x{count}.trans, matrix {matrix}, lane {lane}");
            }
        }
    }
}
