"""Tests of check.py on assembled snippets. The check must find every violation and report nothing else.

Needs binutils, and llvm-mca of LLVM 19 as $LLVM_MCA. The last line says how many tests passed and failed.
"""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import check

MCA = os.environ["LLVM_MCA"]
# Mangled names in the form that rustc writes.
PREFIX = "_RINvMs_NtNtNtCsjrLepGNfwzp_13tutti_kernels3cpu4simd6avx512NtB5_10Avx512Vnni3run"
BF16_PREFIX = "_RINvMs0_NtNtNtCsjrLepGNfwzp_13tutti_kernels3cpu4simd6avx512NtB6_10Avx512Bf163run"
BLOCK_FLOAT = PREFIX + "INtNtNtB9_4gemm7blocked4TileNtNtB1k_12micro_kernel10BlockFloatKjc_Kj1_EEBb_"
INT8 = PREFIX + "INtNtNtB9_5quant7product7RowTileNtNtNtB1k_4int87product11Int8ProductKjc_Kj1_EEBb_"
BF16 = BF16_PREFIX + "INtNtNtBa_4gemm7blocked4TileNtNtB1l_12micro_kernel4DotsKjc_Kj1_EEBc_"
SCORES = BF16_PREFIX + "INtNtNtNtBa_9attention7widened6scores6ScoresNtNtNtBa_6memory6format4Bf16Kjc_Kj1_EEBc_"
VALUES = BF16_PREFIX + "INtNtNtNtBa_9attention4dots6values9AddSharedKjc_Kj1_EEBc_"
# A function that belongs to no group, because its type has no tile size.
OTHER = PREFIX + "INtNtNtB9_4gemm7small_m6SmallMNtNtB1k_12micro_kernel10BlockFloatEEBb_"

(VNNI_GROUP,) = (group for group in check.GROUPS if group.name == "block floating point")


def assemble(**bodies):
    """Returns the functions of a library that has these names and bodies."""
    source = "".join(f'.section .text.{name},"ax"\n{name}:\n{body}\n' for name, body in bodies.items())
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.o")
        subprocess.run(["as", "-o", library, "-"], input=source, text=True, check=True)
        return check.disassemble(library)


def tile(dot="vpdpwssd", rows=12, panels=2, extra=""):
    """Returns the assembly of a loop over the steps of a tile. Each broadcast feeds the dots of all panels."""
    accumulators = rows * panels
    lines = [f"vmovdqu64 {64 * p}(%rsi,%rax), %zmm{accumulators + p}" for p in range(panels)]
    for row in range(rows):
        lines.append(f"vpbroadcastd {4 * row}(%rdx), %zmm31")
        lines += [f"{dot} %zmm31, %zmm{accumulators + p}, %zmm{row * panels + p}" for p in range(panels)]
    return "\n".join(["1:", *lines, extra, "addq $64, %rax", "addq $48, %rdx", "decq %rcx", "jne 1b", "ret"])


def violations(body, name=BLOCK_FLOAT):
    report = check.check(assemble(**{name: body}), MCA, (VNNI_GROUP,))
    assert report.failed == sum(line.startswith("FAILED") for line in report.lines)
    return "\n".join(line for line in report.lines if line.startswith("FAILED"))


class Loops(unittest.TestCase):
    def loops(self, body):
        """Returns the mnemonics of each loop without jumps, and whether the loop is innermost."""
        (function,) = assemble(f=body)
        return [
            (" ".join(i.mnemonic for i in loop.instructions if not i.jumps), loop.innermost)
            for loop in check.find_loops(function)
        ]

    def test_straight_code_has_none(self):
        self.assertEqual(self.loops("test %eax, %eax; je 1f; inc %eax; 1: ret"), [])

    def test_a_loop_of_one_block(self):
        self.assertEqual(self.loops("inc %eax; 1: dec %ecx; jne 1b; ret"), [("dec", True)])

    def test_a_loop_of_several_blocks(self):
        self.assertEqual(self.loops("1: dec %ecx; je 2f; inc %eax; jmp 1b; 2: ret"), [("dec inc", True)])

    def test_loops_in_a_loop(self):
        inner = "inc %eax; 2: dec %ecx; jne 2b; inc %ebx; 3: neg %ecx; jne 3b;"
        expected = [("inc inc not", False), ("dec", True), ("neg", True)]
        self.assertEqual(self.loops(f"1: {inner} not %edx; jne 1b; ret"), expected)

    def test_a_loop_with_two_entries(self):
        self.assertEqual(self.loops("je 2f; 1: inc %eax; 2: dec %eax; jne 1b; ret"), [("inc dec", True)])

    def test_jump_tables_lead_to_what_is_not_reached_otherwise(self):
        body = "1: jmp *%rax; nop; 2: inc %eax; jne 2b; dec %ecx; jmp 1b; neg %eax; ret"
        self.assertEqual(self.loops(body), [("dec", False), ("inc", True)])

    def test_padding_is_no_target_of_a_jump_table(self):
        body = "jmp *%rax; dec %ecx; jmp 2f; 1: nopl (%rax); 2: inc %eax; 3: neg %eax; jne 3b; jne 2b; ret"
        self.assertEqual(self.loops(body), [("inc", False), ("neg", True)])

    def test_a_tail_call_is_no_loop(self):
        self.assertEqual(self.loops("inc %eax; jmp elsewhere"), [])

    def test_assembly_written_out_in_rust(self):
        body = "1: .intel_syntax noprefix; vpdpwssd zmm0, zmm1, zmm2; .att_syntax prefix; dec %ecx; jne 1b; ret"
        (function,) = assemble(f=body)
        (loop,) = check.find_loops(function)
        self.assertEqual(loop.size("vpdpwssd"), (1, 1))


class Names(unittest.TestCase):
    def test_each_group_has_its_functions(self):
        names = (BLOCK_FLOAT, INT8, BF16, SCORES, VALUES)
        functions = assemble(**{name: "ret" for name in [*names, OTHER]})
        for group, function in zip(check.GROUPS, functions, strict=False):
            self.assertEqual([f for f in functions if re.search(group.functions, f.name)], [function], group.name)

    def test_rows_come_before_panels(self):
        names = {
            "Avx512Vnni>::run::<cpu::gemm::blocked::Tile<cpu::gemm::micro_kernel::BlockFloat, 14, 2>>": "14",
            "Avx512Vnni>::run::<cpu::gemm::blocked::Tile<cpu::gemm::micro_kernel::BlockFloat, 8: usize, 3: usize, 3: usize>>": "8",
            "Avx512Vnni>::run::<cpu::gemm::small_m::Rows<1, 4>>": "1",
        }
        for name, rows in names.items():
            self.assertEqual(re.search(VNNI_GROUP.functions, name)["rows"], rows)


class Checks(unittest.TestCase):
    def test_a_good_tile(self):
        self.assertEqual(violations(tile()), "")
        self.assertEqual(violations(tile(rows=14)), "")
        self.assertEqual(violations(tile(rows=8, panels=3)), "")

    def test_no_function(self):
        self.assertIn("no function's name matches", violations(tile(), OTHER))

    def test_no_dots(self):
        self.assertIn("no loop has vpdpwssd", violations(tile("vpdpbusd")))
        self.assertIn("no loop to predict", violations(tile("vpdpbusd")))

    def test_dots_outside_loops(self):
        self.assertIn("no loop has vpdpwssd", violations("vpdpwssd %zmm0, %zmm1, %zmm2; 1: dec %ecx; jne 1b; ret"))

    def test_dots_on_narrower_registers(self):
        self.assertIn("no loop has vpdpwssd", violations("1: vpdpwssd %ymm0, %ymm1, %ymm2; dec %ecx; jne 1b; ret"))

    def test_dots_taken_apart(self):
        split = "vpmaddwd %zmm31, %zmm30, %zmm29; vpaddd %zmm29, %zmm0, %zmm0"
        self.assertIn("1 vpmaddwd on zmm", violations(tile(extra=split)))

    def test_dots_around_a_loop(self):
        found = violations(tile(extra="2: prefetcht0 (%r8); dec %r9d; jne 2b"))
        self.assertIn("a loop of vpdpwssd with 24 accumulators contains another loop", found)

    def test_spills(self):
        framed = "push %rbp; mov %rsp, %rbp; "
        for body in [
            tile(extra="vmovdqu64 %zmm30, 64(%rsp)"),
            tile(extra="vmovups 64(%rsp,%rax), %zmm30"),
            tile(extra="vpaddd 64(%rsp), %zmm30, %zmm30"),
            framed + tile(extra="vmovdqu64 -64(%rbp), %zmm30"),
        ]:
            self.assertIn("1 zmm operands on the stack", violations(body))

    def test_what_is_no_spill(self):
        for extra in [
            "mov 64(%rsp), %r8",
            "vmovdqu 64(%rsp), %ymm15",
            "vpbroadcastd 64(%rsp), %zmm30",
            "vpaddd 64(%rsp){1to16}, %zmm30, %zmm30",
            # Without a frame pointer, `rbp` points to data.
            "vmovdqu64 64(%rbp), %zmm30",
        ]:
            self.assertNotIn("on the stack", violations(tile(extra=extra)))
        outside = "1: vmovdqu64 %zmm0, (%rsp); dec %ecx; jne 1b; " + tile()
        self.assertEqual(violations(outside), "")


class Throughput(unittest.TestCase):
    def rate(self, body, group=VNNI_GROUP):
        (function,) = assemble(f=body)
        (loop,) = check.find_loops(function)
        return check.predict(MCA, group.model, loop, group.dot)

    def test_models_know_two_ports(self):
        for group in check.GROUPS:
            if group.model is not None:
                dots = "; ".join(f"{group.dot} %zmm30, %zmm31, %zmm{i}" for i in range(24))
                rate = self.rate(f"1: {dots}; dec %ecx; jne 1b; ret", group)
                self.assertAlmostEqual(rate.dots_per_cycle, 2, delta=0.02)
                self.assertAlmostEqual(rate.micro_ops_per_dot, 26 / 24, delta=0.01)

    def test_loads_are_one_micro_operation(self):
        # 24 dots, 12 broadcasts, 2 loads, and 4 instructions of the loop.
        self.assertAlmostEqual(self.rate(tile()).micro_ops_per_dot, 42 / 24, delta=0.01)

    def test_a_register_that_is_loaded_and_changed_makes_no_chain(self):
        load = "vpbroadcastd (%rdx), %zmm31; vpslld $1, %zmm31, %zmm31"
        dots = "; ".join(f"vpdpwssd %zmm31, %zmm30, %zmm{i}" for i in range(4))
        body = f"1: {'; '.join([load, dots] * 6)}; dec %ecx; jne 1b; ret"
        self.assertGreater(self.rate(body).dots_per_cycle, 0.7)

    def test_one_panel_is_too_little(self):
        self.assertIn("2.42 micro-operations per dot, not 2.0 at most", violations(tile(rows=12, panels=1)))

    def test_loads_with_every_dot_are_too_many(self):
        dots = "; ".join(f"vpdpwssd {4 * i}(%rdx){{1to16}}, %zmm31, %zmm{i}" for i in range(24))
        self.assertIn("micro-operations per dot, not 2.0 at most", violations(f"1: {dots}; dec %ecx; jne 1b; ret"))

    def test_one_chain_is_too_slow(self):
        self.assertIn("0.20 dots per cycle, not 1.8", violations("1: vpdpwssd %zmm1, %zmm2, %zmm0; dec %ecx; jne 1b; ret"))

    def test_the_largest_tile_counts(self):
        small = BLOCK_FLOAT.replace("Kjc_Kj1_", "Kj1_Kj1_")
        chain = "1: vpdpwssd %zmm1, %zmm2, %zmm0; dec %ecx; jne 1b; ret"
        report = check.check(assemble(**{small: chain, BLOCK_FLOAT: tile()}), MCA, (VNNI_GROUP,))
        self.assertEqual(report.failed, 0)
        report = check.check(assemble(**{small: tile(), BLOCK_FLOAT: chain}), MCA, (VNNI_GROUP,))
        self.assertGreater(report.failed, 0)

    def test_what_llvm_mca_rejects_is_a_violation(self):
        functions = assemble(**{BLOCK_FLOAT: tile()})
        (loop,) = check.find_loops(functions[0])
        loop.instructions.append(check.Instruction(0, "unknown", "%zmm0", relocated=False))
        self.assertIn("llvm-mca: ", "".join(check.check(functions, "false", (VNNI_GROUP,)).lines))
        self.assertRaises(check.McaError, check.predict, MCA, VNNI_GROUP.model, loop, VNNI_GROUP.dot)


if __name__ == "__main__":
    result = unittest.main(exit=False, verbosity=0).result
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed} passed, {failed} failed", flush=True)
    sys.exit(failed > 0 or result.testsRun == 0)
