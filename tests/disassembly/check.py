"""Checks the machine code of the CPU kernels: dot-product instructions, register spills and predicted throughput.

    check.py --mca LLVM_MCA LIBRARY

LIBRARY is the kernels' .rlib, built in the release profile with v0 symbol names. A violation is one line on stdout, and
the last line says how many checks passed and failed.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, field

# The end of the name of a function for one tile size. The last generic arguments of the tile's type are at least two
# numbers, and the first of them is the number of rows.
TILE = r".*?(?:<|, )(?P<rows>\d+)(?:: usize)?(?:, \d+(?:: usize)?)+>>$"
# Excludes attention over keys and values in formats other than bfloat16, because it uses no dot-product instructions.
BF16 = r"(?!.*\bF(?:16|32)\b)"


@dataclass(frozen=True)
class Group:
    """A group of functions with the same requirements."""

    name: str
    # Regular expression for the demangled names of the functions, without the crate's name and hash.
    functions: str
    # Mnemonic of the dot-product instruction on 512-bit registers. Each function needs an innermost loop with it.
    dot: str
    # Mnemonics that no function may use on 512-bit registers.
    forbidden: tuple[str, ...] = ()
    # LLVM's processor model for the throughput check, or None if throughput is not checked. `timed` is a regular
    # expression for the functions to check; only the largest tiles among them are checked.
    model: str | None = None
    timed: str = ""


VNNI = r"\bAvx512Vnni>::run::<cpu::"
INT8 = r"quant::product::RowTile<cpu::quant::int8::product::Int8Product"
DOTS = r"\bAvx512Bf16>::run::<cpu::"
# The processor models used here have two ports for 512-bit arithmetic, so a loop can reach two dots per cycle at most.
# LLVM 19's models of sapphirerapids and znver4 cannot judge vdpbf16ps: for 24 independent dots on registers alone, they
# predict 0.5 and 0.33 dots per cycle, with 4 and 2 micro-operations per dot. LLVM's model of cooperlake, the first
# processor with the instruction, predicts 2 dots per cycle with 1 micro-operation per dot.
#
# Products of a single tile (`gemm::small_m`) read weights from memory, which llvm-mca does not model, so their
# throughput is not checked.
GROUPS = (
    Group("block floating point", VNNI + "gemm::" + TILE, "vpdpwssd", ("vpmaddwd",), "cascadelake", "gemm::blocked::"),
    Group("int8", VNNI + INT8 + TILE, "vpdpbusd", ("vpmaddwd",), "cascadelake", "Int8Product"),
    Group("bfloat16", DOTS + "gemm::" + TILE, "vdpbf16ps", (), "cooperlake", "gemm::blocked::"),
    Group("attention scores", DOTS + r"attention::(?=.*\bScores<)" + BF16 + TILE, "vdpbf16ps"),
    Group("attention values", DOTS + r"attention::(?!.*\bScores<)" + BF16 + TILE, "vdpbf16ps"),
)
# A loop with the most accumulators must be an innermost loop. Loops with at most this many accumulators are exempt: in
# a tile of one or two rows, the loop over the remainder can have as many as the main loop.
FEW_ACCUMULATORS = 3
MIN_DOTS_PER_CYCLE = 1.8
# From Skylake to Cooper Lake, Intel's processors rename four micro-operations per cycle, which llvm-mca does not model.
# With more than two micro-operations per dot, such a processor cannot reach two dots per cycle.
MAX_MICRO_OPS_PER_DOT = 2.0


@dataclass(frozen=True)
class Instruction:
    address: int
    mnemonic: str
    operands: str
    # True if the linker fills in a part of the instruction. The target of such a jump or call is another function.
    relocated: bool

    @property
    def jumps(self):
        return self.mnemonic.startswith("j")

    @property
    def pads(self):
        return self.mnemonic.startswith("nop") or self.mnemonic == "int3" or self.operands == "%ax,%ax"

    @property
    def ends_block(self):
        return self.jumps or self.mnemonic in ("ret", "ud2", "hlt")

    @property
    def target(self):
        """The address of the target of a direct jump within the function, or None."""
        if not self.jumps or self.relocated or self.operands.startswith("*"):
            return None
        return int(self.operands.split()[0], 16)

    @property
    def through_table(self):
        return self.mnemonic == "jmp" and self.operands.startswith("*") and not self.relocated

    @property
    def loaded_from(self):
        """The memory operand of a plain load of a 512-bit register, with or without broadcast. Otherwise None."""
        load = re.fullmatch(r"(.*\)),%zmm\d+", self.operands)
        return load[1] if load and re.match(r"vmov[adu]|vp?broadcast", self.mnemonic) else None

    @property
    def last_register(self):
        """The number of the vector register in the last operand, which the instruction may write, or None."""
        register = re.search(r"%[xyz]mm(\d+)(?:\{.*\})?$", self.operands)
        return register[1] if register else None

    def is_zmm(self, mnemonic):
        return self.mnemonic == mnemonic and "%zmm" in self.operands

    def spills_zmm(self, stack):
        """True if the instruction reads or writes a whole 512-bit register on the stack, as a move or as an operand of
        arithmetic. `stack` holds the registers that point into the stack frame."""
        if "%zmm" not in self.operands or "{1to" in self.operands or "broadcast" in self.mnemonic:
            return False
        return any(base in stack for base in re.findall(r"\((%\w+)", self.operands))


@dataclass
class Function:
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def stack(self):
        """The registers that point into the function's stack frame."""
        framed = any(i.mnemonic == "mov" and i.operands == "%rsp,%rbp" for i in self.instructions)
        return {"%rsp", "%rbp"} if framed else {"%rsp"}


@dataclass(frozen=True)
class Loop:
    """A loop of a function. Its instructions are in the order of their addresses, without those of nested loops."""

    function: Function
    instructions: list[Instruction]
    innermost: bool

    def dots(self, mnemonic):
        return [i for i in self.instructions if i.is_zmm(mnemonic)]

    def accumulators(self, mnemonic):
        """The number of different registers to which the loop's dots add."""
        return len({i.last_register for i in self.dots(mnemonic)})

    def size(self, mnemonic):
        return (self.accumulators(mnemonic), len(self.dots(mnemonic)))


def disassemble(library):
    """Returns the functions of a library of objects, with shortened names."""
    command = ["objdump", "--disassemble", "--reloc", "--demangle", "--no-show-raw-insn", "--wide", library]
    return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse(listing):
    functions = []
    for line in listing.splitlines():
        if start := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            functions.append(Function(shorten(start[1])))
        elif re.match(r"\s+[0-9a-f]+: R_X86_64_", line):
            code = functions[-1].instructions
            last = code[-1]
            code[-1] = Instruction(last.address, last.mnemonic, last.operands, relocated=True)
        elif instruction := re.match(r"\s*([0-9a-f]+):\t(.*)$", line):
            # objdump writes remarks after '#', and in angle brackets after an address.
            text = re.sub(r"\s*(#.*|<.*>)$", "", instruction[2]).strip()
            mnemonic, _, operands = text.partition(" ")
            # objdump writes an instruction's prefixes as separate words.
            while mnemonic in ("data16", "cs", "ds", "lock", "rep", "repz", "repnz", "notrack", "bnd"):
                mnemonic, _, operands = operands.strip().partition(" ")
            if mnemonic:
                address = int(instruction[1], 16)
                functions[-1].instructions.append(Instruction(address, mnemonic, operands.strip(), relocated=False))
    return functions


def shorten(name):
    """Returns a demangled name without the crate's name and hash."""
    return re.sub(r"\btutti_kernels(\[[0-9a-f]+\])?::", "", name)


def find_loops(function):
    """Returns the loops of the function's control flow graph, including nested ones."""
    blocks = split_blocks(function.instructions)
    successors = edges(blocks)
    loops = []
    pending = cycles(blocks.keys(), successors)
    while pending:
        nodes = pending.pop()
        # Without the edges to the loop's entries, only the inner loops remain.
        entries = {to for node in blocks.keys() - nodes for to in successors[node] & nodes}
        entries |= {min(blocks)} & nodes
        entries = entries or {min(nodes)}
        inner = cycles(nodes, {node: successors[node] - entries for node in nodes})
        for nested in inner:
            for node in nested:
                successors[node] = successors[node] - entries
        pending += inner
        own = sorted(nodes.difference(*inner))
        loops.append(Loop(function, [i for start in own for i in blocks[start]], innermost=not inner))
    return sorted(loops, key=lambda loop: loop.instructions[0].address)


def split_blocks(instructions):
    """Returns the basic blocks by their first addresses."""
    starts = {i.target for i in instructions}
    blocks, block = {}, None
    for instruction in instructions:
        if block is None or instruction.address in starts:
            block = blocks[instruction.address] = []
        block.append(instruction)
        if instruction.ends_block:
            block = None
    return blocks


def edges(blocks):
    """Returns the possible successors of each block."""
    successors = {}
    starts = sorted(blocks)
    for start, following in zip(starts, starts[1:] + [None]):
        last = blocks[start][-1]
        to = {last.target} & blocks.keys()
        if last.mnemonic not in ("jmp", "ret", "ud2", "hlt") and following is not None:
            to.add(following)
        successors[start] = to
    # Jump tables are not read. Instead, a jump through a table is taken to lead to every block that is not reached
    # otherwise, except padding.
    reached, targets = set(), set()
    for start in starts:
        if start in reached or all(i.pads for i in blocks[start]):
            continue
        if start != starts[0]:
            targets.add(start)
        pending = [start]
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                pending += successors[node]
    for start, to in successors.items():
        if blocks[start][-1].through_table:
            to |= targets
        elif start not in reached:
            to.clear()
    return successors


def cycles(nodes, graph):
    """The strongly connected components of `nodes` that have an edge within (Tarjan's algorithm, without recursion)."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []
    for root in sorted(nodes):
        work = [] if root in index else [(root, None)]
        while work:
            node, successors = work.pop()
            if successors is None:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
                successors = iter(sorted(graph[node] & nodes))
            for to in successors:
                if to not in index:
                    work += [(node, successors), (to, None)]
                    break
                if to in on_stack:
                    low[node] = min(low[node], index[to])
            else:
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    component = {node}
                    while (last := stack.pop()) != node:
                        component.add(last)
                    on_stack -= component
                    if len(component) > 1 or node in graph[node]:
                        found.append(component)
    return found


@dataclass(frozen=True)
class Throughput:
    dots_per_cycle: float
    micro_ops_per_dot: float


class McaError(Exception):
    """llvm-mca rejected a loop."""


def for_mca(loop):
    """Yields the loop's instructions, changed so that llvm-mca models them right."""
    computed = {i.last_register for i in loop.instructions if not i.loaded_from}
    for i in loop.instructions:
        if i.jumps:
            # The target does not matter to llvm-mca, so that one label serves all jumps.
            yield f"{i.mnemonic} .Lloop"
        elif i.loaded_from and i.last_register not in computed:
            # LLVM's models count an extra arithmetic micro-operation for a load with EVEX encoding. Skylake and its
            # successors do not have this micro-operation. So a load of `mm0`, which no other instruction uses, replaces
            # the load.
            yield f"movq {i.loaded_from},%mm0"
        else:
            yield f"{i.mnemonic} {i.operands}"


def predict(mca, model, loop, dot):
    """Returns llvm-mca's prediction for a loop whose data is all in the first-level cache. All branches count as taken,
    even rare ones."""
    iterations = 500
    command = [mca, "-mtriple=x86_64", f"-mcpu={model}", f"-iterations={iterations}", "-instruction-info=false", "-"]
    text = ".Lloop:\n" + "\n".join(for_mca(loop)) + "\n"
    run = subprocess.run(command, input=text, capture_output=True, text=True)
    numbers = dict(re.findall(r"^(Total Cycles|Total uOps): +(\d+)$", run.stdout, re.MULTILINE))
    if run.returncode or len(numbers) != 2:
        raise McaError(run.stderr.strip())
    dots = iterations * len(loop.dots(dot))
    return Throughput(dots / int(numbers["Total Cycles"]), int(numbers["Total uOps"]) / dots)


@dataclass
class Report:
    """Results of the checks. `lines` is text for people."""

    passed: int = 0
    failed: int = 0
    lines: list[str] = field(default_factory=list)

    def check(self, holds, violation):
        if holds:
            self.passed += 1
        else:
            self.failed += 1
            self.lines.append(f"FAILED {violation}")


def check(functions, mca, groups=GROUPS):
    report = Report()
    for group in groups:
        check_group(report, group, functions, mca)
    return report


def check_group(report, group, functions, mca):
    matches = [(function, re.search(group.functions, function.name)) for function in functions]
    tiles = [(function, int(match["rows"])) for function, match in matches if match]
    report.lines.append(f"{group.name}: {len(tiles)} functions")
    report.check(tiles, f"{group.name}: no function's name matches {group.functions}")
    # The main loop of each function whose throughput may be checked, with the size by which the largest tiles are
    # chosen.
    timed = []
    for function, rows in tiles:
        loop = check_function(report, group, function)
        if group.model and loop and re.search(group.timed, function.name):
            timed.append(((rows, loop.accumulators(group.dot)), loop))
    if group.model:
        report.check(timed, f"{group.name}: no loop to predict the throughput of")
        largest = max((size for size, _ in timed), default=None)
        for loop in (loop for size, loop in timed if size == largest):
            check_throughput(report, group, loop, mca)


def check_function(report, group, function):
    """Checks the instructions of one function and returns its main loop: the innermost one with the most
    accumulators."""
    name = f"{group.name}: {tile_name(function.name)}"
    for mnemonic in group.forbidden:
        found = sum(i.is_zmm(mnemonic) for i in function.instructions)
        report.check(not found, f"{name}: {found} {mnemonic} on zmm")
    loops = [loop for loop in find_loops(function) if loop.dots(group.dot)]
    report.check(loops, f"{name}: no loop has {group.dot} on zmm")
    if not loops:
        return None
    innermost = [loop for loop in loops if loop.innermost]
    stack = function.stack
    spills = sum(i.spills_zmm(stack) for loop in innermost for i in loop.instructions)
    report.check(not spills, f"{name}: {spills} zmm operands on the stack in innermost loops of {group.dot}")
    most = max(loop.accumulators(group.dot) for loop in loops)
    main = max(innermost, key=lambda loop: loop.size(group.dot), default=None)
    holds = main and (main.accumulators(group.dot) == most or most <= FEW_ACCUMULATORS)
    report.check(holds, f"{name}: a loop of {group.dot} with {most} accumulators contains another loop")
    return main


def check_throughput(report, group, loop, mca):
    name = f"{group.name}: {tile_name(loop.function.name)} on {group.model}"
    try:
        rate = predict(mca, group.model, loop, group.dot)
    except McaError as error:
        return report.check(False, f"{name}: llvm-mca: {error}")
    dots, micro_ops = rate.dots_per_cycle, rate.micro_ops_per_dot
    report.lines.append(f"{name}: {dots:.2f} dots per cycle, {micro_ops:.2f} micro-operations per dot")
    report.check(dots >= MIN_DOTS_PER_CYCLE, f"{name}: {dots:.2f} dots per cycle, not {MIN_DOTS_PER_CYCLE}")
    most = MAX_MICRO_OPS_PER_DOT
    report.check(micro_ops <= most, f"{name}: {micro_ops:.2f} micro-operations per dot, not {most} at most")


def tile_name(name):
    """Returns the type that an instruction path's `run` function was compiled for."""
    return name.partition("::run::<")[2].removesuffix(">").replace("cpu::", "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mca", required=True, help="llvm-mca of LLVM 19")
    parser.add_argument("library", help="the kernels' .rlib")
    arguments = parser.parse_args()
    report = check(disassemble(arguments.library), arguments.mca)
    print(*report.lines, sep="\n")
    print(f"{report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
