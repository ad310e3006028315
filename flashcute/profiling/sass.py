"""Parses the output of ``cuobjdump --dump-sass``: instructions, loops, the loops with MMAs.

The input is text, so recorded excerpts work, too. Both kinds of matrix instructions are known: HMMA
(mma.sync, one warp) and HGMMA (wgmma, four warps).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import networkx

_FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*?)\s*;"
)
_MMA = re.compile(r"^(HMMA|HGMMA)\.([\dx]+)\.")
_HMMA_SHAPES = {"1688": (16, 8, 8), "16816": (16, 8, 16)}
_ENDS = {"EXIT", "RET", "BRX", "JMX", "BPT", "KILL"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its address in bytes, predicate, opcode with modifiers, operands."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers, e.g. ``"MUFU"``."""
        return self.opcode.partition(".")[0]

    @property
    def never_runs(self) -> bool:
        """Whether its predicate is always false: padding that only takes an issue slot."""
        return self.guard in ("!PT", "!UPT")

    @property
    def mma_shape(self) -> tuple[int, int, int] | None:
        """(m, n, k) of a matrix instruction, else None."""
        found = _MMA.match(self.opcode)
        if found is None:
            return None
        if found[1] == "HMMA":
            return _HMMA_SHAPES.get(found[2])
        m, n, k = map(int, found[2].split("x"))
        return m, n, k

    @property
    def warp_macs(self) -> int:
        """Multiply-adds of one warp's issue of this instruction; 0 if it is no MMA."""
        if self.mma_shape is None:
            return 0
        m, n, k = self.mma_shape
        return m * n * k // (4 if self.name == "HGMMA" else 1)

    @property
    def reads_a_from_smem(self) -> bool:
        """Whether an HGMMA takes both operands from shared memory: the descriptor comes second."""
        return self.name == "HGMMA" and "gdesc" in self.operands.split(",")[1]

    @property
    def branch_target(self) -> int | None:
        """Target address of a direct branch, else None."""
        if self.name not in ("BRA", "WARPSYNC", "BSSY", "JMP"):
            return None
        last = self.operands.split(",")[-1].strip()
        return int(last, 16) if re.fullmatch(r"0x[0-9a-f]+", last) else None

    @property
    def falls_through(self) -> bool:
        """Whether execution may continue at the next instruction."""
        if self.guard and self.guard not in ("PT", "UPT"):
            return True
        if self.name in ("BRA", "JMP"):
            # A predicate can also be an operand: BRA P1, 0x80; BRA.U UP0, 0x80; BRA.DIV UR4, 0x80.
            return "," in self.operands
        return self.name not in _ENDS


@dataclasses.dataclass(frozen=True)
class Loop:
    """An innermost loop with matrix instructions.

    Attributes:
        always: Instructions that every iteration issues or, where warps may skip all MMAs, every
            iteration with MMAs; also the copies of the next block (LDGSTS), which only the last
            iteration skips.
        sometimes: The other instructions of the loop: basic blocks under a branch, such as those of
            the mask or the rescaling, and the polling loops of barriers.
    """

    always: tuple[Instruction, ...]
    sometimes: tuple[Instruction, ...]

    @property
    def address(self) -> int:
        """Address of the first instruction that every iteration issues."""
        return self.always[0].address

    @property
    def warp_macs(self) -> int:
        """Multiply-adds of one warp in one iteration."""
        return sum(instruction.warp_macs for instruction in self.always)

    def mix(self) -> dict[str, int]:
        """How often each opcode occurs among :attr:`always`, the most frequent first."""
        names = collections.Counter(instruction.name for instruction in self.always)
        return dict(names.most_common())

    def mma_shapes(self) -> dict[str, int]:
        """How often each kind of matrix instruction occurs, by opcode and place of operand A."""
        kinds = collections.Counter(
            x.opcode + {True: " A in smem", False: " A in registers"}[x.reads_a_from_smem]
            if x.name == "HGMMA"
            else x.opcode
            for x in self.always
            if x.warp_macs
        )
        return dict(kinds.most_common())


@dataclasses.dataclass(frozen=True)
class Function:
    """One kernel's machine code."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def mma_loops(self) -> tuple[Loop, ...]:
        """Innermost loops with matrix instructions, in the order of their addresses."""
        return tuple(_mma_loops(self.instructions))

    def main_loop(self) -> Loop | None:
        """The loop over unmasked key blocks; None if no loop holds an MMA.

        Kernels that peel have several copies of the loop. The copy for unmasked blocks has the
        fewest instructions per multiply-add, and long sequences spend most of their time in it.
        """
        return min(self.mma_loops, key=lambda loop: len(loop.always) / loop.warp_macs, default=None)

    def register_pools(self) -> dict[str, int]:
        """Registers per thread after setmaxnreg.dec, ``"released"``, and .inc, ``"claimed"``."""
        pools = {}
        for x in self.instructions:
            if x.name == "USETMAXREG":
                kind = "released" if "DEALLOC" in x.opcode else "claimed"
                pools[kind] = int(x.operands.split(",")[-1], 16)
        return pools


def parse(text: str) -> list[Function]:
    """Parses every function of a ``cuobjdump --dump-sass`` output, in order, without encodings.

    Raises:
        ValueError: where the text holds no instruction.
    """
    found: list[tuple[str, list[Instruction]]] = []
    for line in text.splitlines():
        if head := _FUNCTION.match(line):
            found.append((head[1], []))
        elif match := _INSTRUCTION.match(line):
            if not found:
                found.append(("", []))
            address = int(match["address"], 16)
            words = match["guard"] or "", match["opcode"], match["operands"]
            found[-1][1].append(Instruction(address, *words))
    functions = [Function(name, tuple(code)) for name, code in found if code]
    if not functions:
        raise ValueError(
            "sass.parse: expected the output of `cuobjdump --dump-sass` with at least one "
            f"instruction, got {len(text)} characters without one"
        )
    return functions


def _blocks(code: Sequence[Instruction]) -> dict[int, list[Instruction]]:
    """Returns the basic blocks by the address of their first instruction."""
    leaders = {code[0].address}
    for x, following in zip(code, [*code[1:], None], strict=True):
        target = x.branch_target
        if target is not None:
            leaders.add(target)
        ends = x.name in _ENDS or x.name == "BSYNC" or (target is not None and x.name != "BSSY")
        if ends and following is not None:
            leaders.add(following.address)
    blocks: dict[int, list[Instruction]] = {}
    for x in code:
        if x.address in leaders:
            start = x.address
            blocks[start] = []
        blocks[start].append(x)
    return blocks


def _flow_graph(code: Sequence[Instruction]) -> tuple[networkx.DiGraph, dict]:
    """Returns the control flow between basic blocks, and the blocks; calls are not followed."""
    blocks = _blocks(code)
    starts = list(blocks)
    graph = networkx.DiGraph()
    graph.add_nodes_from(starts)
    reconvergence: dict[str, int] = {}  # target of BSYNC by convergence barrier
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        for x in blocks[start]:
            if x.name == "BSSY" and x.branch_target is not None:
                reconvergence[x.operands.split(",")[0]] = x.branch_target
        last = blocks[start][-1]
        if last.name == "BSYNC" and last.operands in reconvergence:
            graph.add_edge(start, reconvergence[last.operands])
            continue
        if last.branch_target in blocks:
            graph.add_edge(start, last.branch_target)
        if last.falls_through and following is not None:
            graph.add_edge(start, following)
    return graph, blocks


def _natural_loops(graph: networkx.DiGraph, entry: int) -> dict[int, tuple[set[int], set[int]]]:
    """Returns (body, latches) of each loop by its header; body blocks reach a back edge in it."""
    parent = _immediate_dominators(graph, entry)
    loops: dict[int, tuple[set[int], set[int]]] = {}
    for source, header in graph.edges:
        if source not in parent or header not in _dominators(parent, source):
            continue
        body, latches = loops.setdefault(header, ({header}, set()))
        latches.add(source)
        pending = [source]
        while pending:
            block = pending.pop()
            if block not in body:
                body.add(block)
                pending += [p for p in graph.predecessors(block) if p in parent]
    return loops


def _immediate_dominators(graph: networkx.DiGraph, entry: int) -> dict[int, int]:
    """Returns each reachable block's immediate dominator; the entry's is itself in any networkx."""
    return {**networkx.immediate_dominators(graph, entry), entry: entry}


def _dominators(parent: dict[int, int], block: int) -> set[int]:
    """Returns the blocks that every path from the entry to ``block`` passes, itself included."""
    found = {block}
    while parent[block] != block:
        block = parent[block]
        found.add(block)
    return found


def _passed_with_mmas(
    body: networkx.DiGraph, header: int, latches: set[int], macs: Mapping[int, int]
) -> set[int]:
    """Returns the blocks that every iteration passes that issues a loop's MMAs.

    Blocks with MMAs that one iteration can pass count together, those with most multiply-adds first
    (``macs``, by block); of two copies, of which an iteration passes one, the smaller does not.
    """
    onward = body.edge_subgraph(edge for edge in body.edges if edge[1] != header)
    behind: dict[int, set[int]] = {}
    passed: set[int] = set()
    for block in sorted(macs, key=lambda start: (-macs[start], start)):
        reached = networkx.descendants(onward, block)
        if all(block in after or other in reached for other, after in behind.items()):
            behind[block] = reached
            passed |= _dominators(_immediate_dominators(body, header), block)
            parent = _immediate_dominators(onward, block)
            ends = [_dominators(parent, latch) for latch in latches if latch in parent]
            passed |= set.intersection(*ends)
    return passed


def _mma_loops(code: Sequence[Instruction]) -> Iterable[Loop]:
    graph, blocks = _flow_graph(code)
    entry = code[0].address
    parent = _immediate_dominators(graph, entry)
    with_mma = {start for start, block in blocks.items() if any(x.warp_macs for x in block)}
    loops = {h: loop for h, loop in _natural_loops(graph, entry).items() if loop[0] & with_mma}
    for header, (body, latches) in sorted(loops.items()):
        if any(other != header and inner < body for other, (inner, _) in loops.items()):
            continue
        always = set.intersection(*(_dominators(parent, latch) for latch in latches)) & body
        if not always & with_mma:
            macs = {x: sum(y.warp_macs for y in blocks[x]) for x in body & with_mma}
            always |= _passed_with_mmas(graph.subgraph(body), header, latches, macs)
        always |= {start for start in body if any(x.name == "LDGSTS" for x in blocks[start])}
        issued = [x for start in sorted(always) for x in blocks[start]]
        rest = [x for start in sorted(body - always) for x in blocks[start]]
        if any(x.warp_macs for x in issued):
            yield Loop(tuple(issued), tuple(rest))
