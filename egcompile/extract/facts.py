"""What holds of classes and e-nodes in every plan: layouts, views, row spaces, phases, places to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from egcompile.extract.choices import Choices
from egcompile.extract.fusible import LOOPS, Role, Space, fusible
from egcompile.extract.layout import is_channels_last, results, view
from egcompile.ir.buffer import Buffer

LONGEST_CHAIN = 32
"""Loop ops in a chain after which a value may be written though its one reader could compute it."""

Layout = tuple[Buffer, ...]


@dataclass(slots=True)
class Facts:
    """Per class `c` or e-node `n`.

    layouts     c -> how its value lies, one buffer an output: static, by the original e-node
    viewable    n -> a movement that is a free view of its operand in memory
    carried     n -> rows of the reductions that may be computed with it inside one kernel
    evaluable   n -> a kernel can compute it (a view of what is always in memory is only read)
    writable    c -> a plan might gain by a generated kernel that writes it
    memory      c -> it can be in memory at all
    depends     c -> bit set of the classes it may be computed from, itself included
    inline      (n, operand position) -> e-nodes of the operand that can be computed with n, in a kernel
                around n or around what n is computed in
    forward     c -> some output of the forward may be computed from it
    backward    c -> it may be computed from a cotangent
    outputs     classes that are returned
    """

    layouts: list[Layout]
    viewable: list[bool]
    carried: list[frozenset[Space]]
    evaluable: list[bool]
    writable: list[bool]
    memory: list[bool]
    depends: list[int]
    inline: dict[tuple[int, int], tuple[int, ...]]
    forward: list[bool]
    backward: list[bool]
    outputs: frozenset[int]

    def buffer(self, c: int) -> Buffer:
        return self.layouts[c][0]


def facts(table: Choices, strides: dict[str, tuple[int, ...]]) -> Facts:
    """`strides` are those of inputs that are not row-major, by name."""
    outputs = frozenset(table.roots)
    depends = _depends(table)
    forward, backward = _phases(table, depends)
    layouts = _layouts(table, strides, outputs)
    viewable = _viewable(table, layouts, backward)
    carried = _carried(table)
    evaluable = _evaluable(table, viewable, carried)
    writable = _writable(table, viewable, carried, evaluable, outputs)
    memory = _memory(table, viewable, writable)
    inline = _inline(table, carried, evaluable)
    return Facts(
        layouts=layouts,
        viewable=viewable,
        carried=carried,
        evaluable=evaluable,
        writable=writable,
        memory=memory,
        depends=depends,
        inline=inline,
        forward=forward,
        backward=backward,
        outputs=outputs,
    )


def _memory(table: Choices, viewable: list[bool], writable: list[bool]) -> list[bool]:
    memory: list[bool] = []
    for c, nodes in enumerate(table.nodes):
        made = writable[c] or any(table.role(n) not in LOOPS for n in nodes)
        seen = any(viewable[n] and memory[k] for n in nodes for k in table.operands[n] if k < c)
        memory.append((made or seen) and not isinstance(table.types[c], tuple))
    return memory


def _layouts(table: Choices, strides: dict[str, tuple[int, ...]], outputs: frozenset[int]) -> list[Layout]:
    layouts: dict[int, Layout] = {}
    for c, nodes in enumerate(table.nodes):
        first = table.original[c]
        ways = [first, *nodes] if first is not None else nodes
        n = next(n for n in ways if all(k in layouts for k in table.operands[n]))
        layout = _layout(table.role(n), table, n, [layouts[k] for k in table.operands[n]], strides)
        if c in outputs and table.role(n) in LOOPS and not is_channels_last(layout[0]):
            layout = (Buffer.contiguous(table.tensor(c)),)
        layouts[c] = layout
    return list(layouts.values())


def _viewable(table: Choices, layouts: Sequence[Layout], backward: Sequence[bool]) -> list[bool]:
    """Movements that strides allow as views. What is returned is row-major, and its memory nobody else's:
    no output is a view of an input, and no gradient one of a value of the forward.
    """
    outputs = frozenset(table.roots[: len(table.joint.outputs)])
    gradients = frozenset(table.roots[len(table.joint.outputs) :])
    of_inputs = [False] * len(table.nodes)
    viewable = [False] * len(table.enodes)
    for c, nodes in enumerate(table.nodes):
        for n in nodes:
            site = table.sites[n]
            if site.role is Role.INPUT:
                of_inputs[c] = True
            if site.role is not Role.MOVEMENT:
                continue
            k = table.operands[n][0]
            of_inputs[c] = of_inputs[c] or of_inputs[k]
            seen = view(site.op, site.attrs, table.tensor(c), layouts[k][0])
            if seen is None:
                continue
            taken = (c in outputs and of_inputs[k]) or (c in gradients and (of_inputs[k] or not backward[k]))
            viewable[n] = not taken and (seen.is_contiguous or not (c in outputs or c in gradients))
    return viewable


def _layout(
    role: Role, table: Choices, n: int, operands: Sequence[Layout], strides: dict[str, tuple[int, ...]]
) -> Layout:
    enode, type = table.enodes[n], table.types[table.owner[n]]
    if role is Role.PROJECTION:
        (index,) = enode.attrs
        assert isinstance(index, int)
        return (operands[0][index],)
    types = type if isinstance(type, tuple) else (type,)
    if role is Role.INPUT:
        given = strides.get(str(enode.attrs[0]))
        return (Buffer.contiguous(types[0]) if given is None else Buffer(types[0], given),)
    buffers = [b[0] for b in operands]
    if role is Role.MOVEMENT and (seen := view(enode.op, enode.attrs, types[0], buffers[0])) is not None:
        return (seen,)
    return tuple(results(enode.op, types, buffers))


def _carried(table: Choices) -> list[frozenset[Space]]:
    """Upwards from the row reductions, along the edges by which a reader can compute them."""
    carried: list[frozenset[Space]] = [frozenset()] * len(table.enodes)
    queue = []
    for n, site in enumerate(table.sites):
        if site.role is Role.ROW_REDUCTION:
            carried[n] = frozenset({site.space})
            queue.append(n)
    while queue:
        n = queue.pop()
        for m, position in table.consumers[table.owner[n]]:
            site = table.sites[m]
            if site.role not in LOOPS or fusible(table.sites[n], site, position, site, carried[n]):
                continue
            if not carried[n] <= carried[m]:
                carried[m] |= carried[n]
                queue.append(m)
    return carried


def _evaluable(table: Choices, viewable: list[bool], carried: list[frozenset[Space]]) -> list[bool]:
    """A viewable movement is computed inside a kernel only with its operand; else it is read as a view."""
    evaluable = [site.role in LOOPS and not viewable[n] for n, site in enumerate(table.sites)]
    for n, site in enumerate(table.sites):  # operands first
        if viewable[n]:
            evaluable[n] = any(
                evaluable[m] and fusible(table.sites[m], site, 0, site, carried[m]) is None
                for m in table.nodes[table.operands[n][0]]
            )
    return evaluable


def _writable(
    table: Choices,
    viewable: list[bool],
    carried: list[frozenset[Space]],
    evaluable: list[bool],
    outputs: frozenset[int],
) -> list[bool]:
    """Where writing can pay: a returned value, one with several readers, or one not to be had otherwise.

    With one reader that can compute it, and that does not repeat it, a value is never worth writing. E-nodes
    of one class are one reader: only one of them is picked.
    """
    count = len(table.nodes)
    wanted = [False] * count
    depth = _chains(table, evaluable)
    for c in reversed(range(count)):
        loops = [n for n in table.nodes[c] if evaluable[n]]
        if isinstance(table.types[c], tuple):
            continue
        readers = table.consumers[c]
        wanted[c] = (
            c in outputs
            or len({table.owner[m] for m, _ in readers}) > 1
            or any(carried[n] for n in loops)
            or depth[c] % LONGEST_CHAIN == LONGEST_CHAIN - 1
            or any(_wants(table, viewable, carried, wanted, c, loops, m, p) for m, p in readers)
        )
    return [
        want and any(writes(table, viewable, evaluable, n) for n in nodes)
        for want, nodes in zip(wanted, table.nodes)
    ]


def _wants(
    table: Choices,
    viewable: list[bool],
    carried: list[frozenset[Space]],
    wanted: list[bool],
    c: int,
    loops: list[int],
    m: int,
    position: int,
) -> bool:
    site, reader = table.sites[m], table.owner[m]
    if viewable[m] and (wanted[reader] or reader <= c):
        return True
    if any(fusible(table.sites[n], site, position, site, carried[n]) for n in loops):
        return True
    return site.op.name == "expand" and table.tensor(reader).numel > table.tensor(c).numel


def _chains(table: Choices, evaluable: list[bool]) -> list[int]:
    depth = [0] * len(table.nodes)
    for c, nodes in enumerate(table.nodes):
        for n in nodes:
            if evaluable[n] and table.role(n) is not Role.CONSTANT:
                depth[c] = max(depth[c], 1 + max((depth[k] for k in table.operands[n] if k < c), default=0))
    return depth


def writes(table: Choices, viewable: list[bool], evaluable: list[bool], n: int) -> bool:
    """Whether a generated kernel may be made around an e-node.

    Not around a view, unless it is smaller than what it is a view of: writing that one is as cheap.
    """
    if not evaluable[n]:
        return False
    if not viewable[n]:
        return True
    operand = table.tensor(table.operands[n][0])
    return table.tensor(table.owner[n]).numel < operand.numel


def _depends(table: Choices) -> list[int]:
    depends = [1 << c for c in range(len(table.nodes))]
    changed = True
    while changed:  # once, and once more to see that it is done; more often round cycles
        changed = False
        for c, nodes in enumerate(table.nodes):
            found = depends[c]
            for n in nodes:
                for k in table.operands[n]:
                    found |= depends[k]
            if found != depends[c]:
                depends[c] = found
                changed = changed or any(k > c for n in nodes for k in table.operands[n])
    return depends


def _inline(
    table: Choices, carried: list[frozenset[Space]], evaluable: list[bool]
) -> dict[tuple[int, int], tuple[int, ...]]:
    sites = table.sites
    return {
        (n, position): tuple(
            m
            for m in table.nodes[k]
            if evaluable[m] and fusible(sites[m], site, position, site, carried[m]) is None
        )
        for n, site in enumerate(sites)
        for position, k in enumerate(table.operands[n])
    }


def _phases(table: Choices, depends: list[int]) -> tuple[list[bool], list[bool]]:
    joint = table.joint
    forward_classes = 0
    for root in table.roots[: len(joint.outputs)]:
        forward_classes |= depends[root]
    cotangents = {node.attr("name") for node in joint.cotangents if node is not None}
    seeds = 0
    for n, site in enumerate(table.sites):
        if site.role is Role.INPUT and site.attrs[0] in cotangents:
            seeds |= 1 << table.owner[n]
    forward = [bool(forward_classes >> c & 1) for c in range(len(depends))]
    return forward, [bool(d & seeds) for d in depends]
