"""`Plan.explain`: what was recognized, rewritten, fused and left apart, and what it costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from egcompile.extract import Extraction, KernelPlan, fusible
from egcompile.extract.fusible import LOOPS, Role, Site
from egcompile.ir.graph import Graph
from egcompile.ir.node import Node
from egcompile.ops.opdef import Kind
from egcompile.partition import Partition
from egcompile.pipeline import Compiled, launches
from egcompile.schedule.kernel import Schedule
from egcompile.schedule.peak import peak

MOST = 40
"""Lines of one section; the rest are counted."""


def explain(compiled: Compiled) -> str:
    """The text, in sections: recognized and opaque ops, rules, kernels, refused fusions, extraction, saved
    values, recomputed values.
    """
    seconds = ", ".join(f"{stage} {t:.2f} s" for stage, t in compiled.seconds.items())
    sections = {
        f"plan for {compiled.target.name}": [seconds],
        "recognized": _recognized(compiled.derived.graph),
        "opaque": _opaque(compiled.derived.graph),
        "rules": str(compiled.report).splitlines(),
        "kernels": [*_kernels(compiled.schedule), *_shared(compiled.schedule)],
        "not fused": _refused(compiled.extraction),
        "extraction": [str(compiled.extraction.stats)],
        "saved for the backward": _saved(compiled.schedule),
        "computed again in the backward": _recomputed(compiled.partition, compiled.extraction.joint.graph),
    }
    return "\n\n".join("\n".join([title, *_shortened(lines)]) for title, lines in sections.items())


def _shortened(lines: Iterable[str]) -> Iterator[str]:
    all_lines = list(lines) or ["none"]
    yield from (f"  {line}" for line in all_lines[:MOST])
    if len(all_lines) > MOST:
        yield f"  ... and {len(all_lines) - MOST} more"


def _recognized(graph: Graph) -> list[str]:
    """Named ops of the derived graph, how often, and where in the model."""
    counts: Counter[str] = Counter()
    places: dict[str, frozenset[str]] = defaultdict(frozenset)
    for node in graph.nodes:
        if node.op.kind is Kind.COMPOSITE:
            counts[node.op.name] += 1
        named = node.inputs[0] if node.op.kind is Kind.PROJECTION else node
        if named.op.kind is Kind.COMPOSITE:
            places[named.op.name] |= graph.origins.get(node, frozenset())
    return [f"{count} x {name}: {_joined(places[name])}" for name, count in sorted(counts.items())]


def _opaque(graph: Graph) -> list[str]:
    """Ops that no rule knows, which ATen runs and differentiates: how often, and where in the model."""
    counts: Counter[str] = Counter()
    places: dict[str, frozenset[str]] = defaultdict(frozenset)
    for node in graph.nodes:
        named = node.inputs[0] if node.op.kind is Kind.PROJECTION else node
        if named.op.derivative is not None:
            counts[named.op.name] += named is node
            places[named.op.name] |= graph.origins.get(node, frozenset())
    return [f"{count} x {name}: {_joined(places[name])}" for name, count in sorted(counts.items())]


def _kernels(schedule: Schedule) -> list[str]:
    """Each kernel that is launched: what it holds, how often, and for which places of the model."""
    lines = []
    for kernel, runs in launches(schedule).items():
        inside = [n for n in kernel.body.nodes if n.op.kind not in (Kind.LEAF, Kind.PROJECTION)]
        counts = Counter(n.op.name for n in inside)
        what = " + ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
        places = _joined(place for run in runs for place in run.origins)
        lines.append(f"{len(runs)} x {kernel.name}: {what} ({places or 'no place in the model'})")
    return lines


def _shared(schedule: Schedule) -> list[str]:
    count = schedule.shared
    return [f"{count} kernel{'s share' if count > 1 else ' shares'} another's launch"] if count else []


def _refused(extraction: Extraction) -> list[str]:
    """Values that one kernel writes and another reads, and why no kernel computes both."""
    reasons: Counter[str] = Counter()
    writer = {node: kernel for kernel in extraction.kernels for node in kernel.writes}
    for reader in extraction.kernels:
        for node in reader.reads:
            value = node
            while value in extraction.views:
                value = extraction.views[value]
            if value in writer:
                settled = value in extraction.settled
                reasons[_reason(writer[value], value, reader, node, settled)] += 1
    return [f"{count} x {reason}" for reason, count in reasons.most_common()]


def _reason(writer: KernelPlan, value: Node, reader: KernelPlan, read: Node, settled: bool) -> str:
    producer = Site.of(value.inputs[0] if value.op.kind is Kind.PROJECTION else value)
    producer = replace(producer, settled=settled)
    root = Site.of(reader.root)
    spaces = {s.space for s in map(Site.of, (value, *writer.nodes)) if s.role is Role.ROW_REDUCTION}
    for consumer in (reader.root, *reader.nodes):
        for position, operand in enumerate(consumer.inputs):
            if operand is read:
                reason = fusible(producer, Site.of(consumer), position, root, spaces)
                if reason is not None:
                    return f"{_named(writer)} -> {_named(reader)}: {reason}"
    return f"{_named(writer)} -> {_named(reader)}: apart is cheaper, or the value is needed in memory anyway"


def _named(kernel: KernelPlan) -> str:
    if Site.of(kernel.root).role in LOOPS and len(kernel.nodes) > 1:
        return f"{kernel.root.op.name} and {len(kernel.nodes) - 1} more"
    return kernel.root.op.name


def _saved(schedule: Schedule) -> list[str]:
    """Bytes of what is kept between forward and backward beside the inputs, the largest first; and of all
    that is alive at once, at most, in each.
    """
    if schedule.backward is None:
        return []
    inputs = schedule.forward.inputs
    peaks = [_size(peak(program, inputs)) for program in (schedule.forward, schedule.backward)]
    kept = [name for name in schedule.saved if name not in schedule.forward.inputs]
    types = {name: schedule.backward.buffers[name].type for name in kept}
    total = _size(sum(type.nbytes for type in types.values()))
    alike = Counter((name.rstrip("0123456789"), type) for name, type in types.items())
    largest = sorted(alike.items(), key=lambda item: -item[0][1].nbytes * item[1])
    return [
        f"{total} in {len(kept)} values, beside {len(schedule.saved) - len(kept)} inputs",
        f"{peaks[0]} at the peak of the forward, {peaks[1]} at that of the backward, gradients included",
        *(f"{count} x {stem}: {type}, {_size(type.nbytes)} each" for (stem, type), count in largest),
    ]


def _recomputed(parts: Partition, graph: Graph) -> list[str]:
    """What the backward computes a second time instead of reading it, what that costs, and what it saves."""
    bounds = f"{_size(parts.saved_bytes)} are saved, in the fastest plan {_size(parts.fastest_bytes)}"
    if parts.smallest_bytes is not None:
        bounds += f", in the smallest {_size(parts.smallest_bytes)}"
    work = [(_named(kernel), kernel.writes) for kernel in parts.recomputed]
    work += [(f"inside its readers, {value.op.name}", (value,)) for value in parts.inside]
    counts: Counter[str] = Counter()
    places: dict[str, set[str]] = defaultdict(set)
    for what, values in work:
        line = f"{what}: {', '.join(str(value.tensor) for value in values)}"
        counts[line] += 1
        places[line].update(*(graph.origins.get(value, ()) for value in values))
    if not work:
        return []
    return [
        f"{len(parts.recomputed)} kernels, {parts.cost:.1f} us predicted; {bounds}",
        *(f"{n} x {line} ({_joined(places[line]) or 'no place in the model'})" for line, n in counts.items()),
    ]


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _joined(places: Iterable[str]) -> str:
    distinct = sorted(set(places))
    return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more places" if len(distinct) > 4 else "")
