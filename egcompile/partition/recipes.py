"""How a value of the forward is made again in the backward: by which kernel, from what, at what cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from egcompile.extract.candidates import LARGEST
from egcompile.extract.cost import EACH_NODE, Costs
from egcompile.extract.extraction import Extraction, KernelPlan
from egcompile.extract.fusible import LOOPS, Role, Site, Space, fusible
from egcompile.ir.buffer import Buffer
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind


@dataclass(frozen=True, eq=False)
class Recipe:
    """A kernel that makes values again.

    kernel   the forward's own kernel, where it makes all its values at once, or a part of it
    of       the forward's kernel
    reads    values of the forward in whose memory lies what it reads; inputs are left out
    cost     microseconds
    product  a matrix product, convolution or attention is in it
    """

    kernel: KernelPlan
    of: KernelPlan
    reads: tuple[Node, ...]
    cost: float
    product: bool


def base(extraction: Extraction, node: Node) -> Node:
    """The value in whose memory a value lies: itself, unless it is a view."""
    while node in extraction.views:
        node = extraction.views[node]
    return node


class Recipes:
    """The recipes of an extraction's values, each found when first asked for."""

    def __init__(self, extraction: Extraction, costs: Costs) -> None:
        self.extraction = extraction
        self.costs = costs
        self.maker = {node: kernel for kernel in extraction.kernels for node in kernel.writes}
        self.rank = {node: i for i, node in enumerate(extraction.joint.graph.nodes)}
        self._returned = self.bases((), extraction.joint.gradients)
        self._found: dict[Node, Recipe | None] = {}
        self._whole: dict[int, Recipe] = {}

    def base(self, node: Node) -> Node:
        return base(self.extraction, node)

    def bases(self, kernels: Iterable[KernelPlan], nodes: Iterable[Node | None] = ()) -> dict[Node, None]:
        """The values in whose memory lies what kernels read, and `nodes`."""
        read = (node for kernel in kernels for node in kernel.reads)
        return dict.fromkeys(self.base(node) for node in (*read, *nodes) if node is not None)

    def readers(self, kernels: Iterable[KernelPlan]) -> dict[Node, list[KernelPlan]]:
        """The kernels that read each value, or views of it."""
        found: dict[Node, list[KernelPlan]] = {}
        for kernel in kernels:
            for node in self.bases([kernel]):
                found.setdefault(node, []).append(kernel)
        return found

    def cost(self, kernel: KernelPlan) -> float:
        return kernel_cost(kernel, self.extraction.buffers, self.costs)

    def added(self, before: Iterable[KernelPlan], after: Iterable[KernelPlan]) -> float:
        """Microseconds that some kernels take beyond others."""
        old, new = ({id(kernel): kernel for kernel in kernels} for kernels in (before, after))
        more = sum(self.cost(new[i]) for i in new if i not in old)
        return more - sum(self.cost(old[i]) for i in old if i not in new)

    def spared(self, value: Node, kept: Collection[Node]) -> float:
        """What the forward gains by not writing a value that it does not read: nothing where its kernel
        writes it in any case.
        """
        kernel = self.maker[value]
        if Site.of(kernel.root).role is Role.CALL or value in restricted(kernel, kept).writes:
            return 0.0
        return self.costs.write(value.tensor)

    def of(self, value: Node) -> Recipe | None:
        """How a written value is made again, or None where it must not be: no second draw, no second call of
        an op that no rule knows, and nothing whose last bit a comparison sees.

        The smallest part of its kernel is taken, which reads what else the kernel writes: the rows that
        are normalized from their sum, not the sum and what it is a sum of.
        """
        if value not in self._found:
            self._found[value] = self._make(value)
        return self._found[value]

    def inside(self, readers: Sequence[KernelPlan], value: Node) -> tuple[list[KernelPlan], float] | None:
        """The kernels that read a value, computing it inside, and the microseconds that this adds.

        None where one of them cannot, where the value is returned, and in plans that are there to compare
        with: these stay as they were extracted.
        """
        recipe = self.of(value)
        if recipe is None or value in self._returned or self.extraction.stats.mode != "exact":
            return None
        kernels = []
        for reader in readers:
            wider = within(reader, recipe.kernel, value)
            if wider is None or value in self.bases([wider]):  # it reads a view as well
                return None
            kernels.append(wider)
        return kernels, self.added(readers, kernels)

    def _make(self, value: Node) -> Recipe | None:
        kernel = self.maker[value]
        if value in self.extraction.settled:
            return None
        if any(node.op.random or node.op.derivative is not None for node in (kernel.root, *kernel.nodes)):
            return None
        part = part_of(kernel, value, set(kernel.writes) - {value})
        if part is not None:
            return self._recipe(part, kernel)
        if id(kernel) not in self._whole:
            self._whole[id(kernel)] = self._recipe(kernel, kernel)
        return self._whole[id(kernel)]

    def _recipe(self, kernel: KernelPlan, of: KernelPlan) -> Recipe:
        reads = dict.fromkeys(map(self.base, kernel.reads))
        return Recipe(
            kernel,
            of,
            tuple(node for node in reads if node in self.maker),
            self.cost(kernel),
            kernel.root.op.flops is not None,
        )


def kernel_cost(kernel: KernelPlan, buffers: Mapping[Node, Buffer], costs: Costs) -> float:
    """Microseconds of a kernel, as extraction's program counts them: an element that is computed for several
    of a larger value, by an expand, is counted as often.
    """
    root = Site.of(kernel.root)
    total = costs.launch if root.role in LOOPS else costs.kernel(root)
    times = dict.fromkeys(kernel.nodes, 0)
    carried = _carried(kernel)
    for node in reversed(kernel.nodes):
        site = Site.of(node)
        reduction = site.role in (Role.ROW_REDUCTION, Role.REDUCTION)
        own = node.tensor.numel if carried[node] else max(node.tensor.numel, times[node])
        total += costs.work(site, node.inputs[0].tensor.numel if reduction else own)
        for position, operand in enumerate(node.inputs):
            if (node, position) in kernel.inlined and not reduction:
                times[operand] = max(times[operand], own)
    for node in kernel.reads:
        reader = next(n for n in (kernel.root, *kernel.nodes) if node in n.inputs)
        total += costs.read(Site.of(reader), reader.inputs.index(node), buffers[node])
    for node in kernel.writes:
        total += costs.write(node.tensor)
        if isinstance(kernel.root.type, tuple) and node not in kernel.nodes:
            total += EACH_NODE
    return total


def part_of(kernel: KernelPlan, value: Node, stored: Collection[Node]) -> KernelPlan | None:
    """The part of a kernel that makes one of the values that it writes, reading `stored` others of them.

    None where that is no kernel by itself, or no smaller one than the whole is.
    """
    if value is kernel.root or value in kernel.nodes:
        if Site.of(value).role not in LOOPS:
            return None
        return _around(value, kernel.inlined, stored, (value,))
    expression = _defined(kernel, value, stored)
    if expression is None:
        return None
    root, inlined = expression
    part = _around(root, inlined | kernel.inlined, stored, (value,))
    return part if set(part.reads) & set(stored) and _legal(part) else None


def within(reader: KernelPlan, part: KernelPlan, value: Node) -> KernelPlan | None:
    """The kernel `reader`, computing inside the value that `part` is made around; None where it cannot."""
    if part.root is not value or value not in reader.reads or Site.of(reader.root).role is Role.CALL:
        return None
    nodes = (reader.root, *reader.nodes)
    edges = {(node, i) for node in nodes for i, operand in enumerate(node.inputs) if operand is value}
    wider = _around(reader.root, reader.inlined | part.inlined | edges, (), reader.writes)
    return wider if len(wider.nodes) <= LARGEST and _legal(wider) else None


def _around(
    root: Node,
    inlined: Collection[tuple[Node, int]],
    stored: Collection[Node],
    writes: tuple[Node, ...],
) -> KernelPlan:
    """A kernel around an op: what it computes inside goes no further down than to `stored` values."""
    inside: dict[Node, None] = {}
    edges: set[tuple[Node, int]] = set()
    reads: dict[Node, None] = {}
    stack = [(root, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            inside.setdefault(node)
            continue
        if node in inside:
            continue
        stack.append((node, True))
        for position, operand in enumerate(node.inputs):
            if (node, position) in inlined and operand not in stored:
                edges.add((node, position))
                stack.append((operand, False))
            else:
                reads[operand] = None
    nodes = tuple(node for node in inside if node is not root or Site.of(root).role in LOOPS)
    return KernelPlan(root, nodes, frozenset(edges), tuple(reads), writes)


def _defined(
    kernel: KernelPlan, value: Node, stored: Collection[Node]
) -> tuple[Node, set[tuple[Node, int]]] | None:
    """An output of a named kernel by the op's definition, over its operands and its `stored` outputs.

    With the edges inside the definition; None where there is no definition, or a product in it.
    """
    root = kernel.root
    if root.op.kind is not Kind.COMPOSITE or value.op.kind is not Kind.PROJECTION:
        return None
    leaves, results = root.op.define(tuple(x.type for x in root.inputs), root.attrs)
    outputs = [x for x in stored if x.op.kind is Kind.PROJECTION and x.inputs[0] is root]
    known = dict(zip(leaves, root.inputs)) | {results[x.attr("index")]: x for x in outputs}
    outside = set(known) - {leaf for i, leaf in enumerate(leaves) if (root, i) in kernel.inlined}
    wanted = results[value.attr("index")]
    if wanted in known:
        return None
    inlined: set[tuple[Node, int]] = set()
    stack = [(wanted, False)]
    while stack:
        node, expanded = stack.pop()
        if node in known:
            continue
        if Site.of(node).role not in LOOPS:
            return None
        if expanded:
            known[node] = Node.make(node.op, tuple(known[x] for x in node.inputs), node.attrs)
            inlined.update((known[node], i) for i, x in enumerate(node.inputs) if x not in outside)
        else:
            stack.append((node, True))
            stack.extend((x, False) for x in node.inputs)
    return known[wanted], inlined


def _carried(kernel: KernelPlan) -> dict[Node, frozenset[Space]]:
    """The rows of the reductions that each node inside a kernel, and its root, is computed from."""
    carried: dict[Node, frozenset[Space]] = {}
    for node in dict.fromkeys((*kernel.nodes, kernel.root)):
        site = Site.of(node)
        inside = [x for i, x in enumerate(node.inputs) if (node, i) in kernel.inlined]
        own = {site.space} if site.role is Role.ROW_REDUCTION else set()
        carried[node] = frozenset(own.union(*(carried[x] for x in inside)))
    return carried


def _legal(kernel: KernelPlan) -> bool:
    """Whether extraction would have allowed it: one row space, and each operand inside where it may be."""
    carried, root = _carried(kernel), Site.of(kernel.root)
    return len(frozenset().union(*carried.values())) < 2 and not any(
        fusible(Site.of(reader.inputs[i]), Site.of(reader), i, root, carried[reader.inputs[i]])
        for reader, i in kernel.inlined
    )


def restricted(kernel: KernelPlan, wanted: Collection[Node]) -> KernelPlan:
    """The kernel, made to write no more than `wanted` and what it is made around."""
    if Site.of(kernel.root).role in LOOPS:
        return replace(kernel, writes=tuple(n for n in kernel.writes if n in wanted or n is kernel.root))
    own = [n for n in kernel.writes if n not in kernel.nodes]
    kept = [n for n in own if n in wanted] or own[:1]
    return replace(kernel, writes=tuple(n for n in kernel.writes if n in wanted or n in kept))
