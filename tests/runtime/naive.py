"""The simplest schedule there is, one call a node: enough to run a joint graph without the planner."""

from collections.abc import Iterator, Sequence

from egcompile.ir import Node, topological
from egcompile.ir.joint import Joint
from egcompile.ops.opdef import Kind
from egcompile.schedule.kernel import Buffer, Call, Free, Program, Schedule, Step


def naive_schedule(joint: Joint) -> Schedule:
    """Saves whatever the backward reads of the forward, inputs and outputs included."""
    cotangents = [ct for ct in joint.cotangents if ct is not None]
    forward = [n for n in topological(joint.outputs) if not isinstance(n.type, tuple)]
    names = {node: f"v{i}" for i, node in enumerate(topological((*joint.primals, *joint.graph.outputs)))}
    names |= {node: node.attr("name") for node in joint.graph.inputs}
    done = set(forward) | set(joint.primals)
    roots = [g for g in joint.gradients if g is not None]
    later = [n for n in topological(roots) if n not in done and not isinstance(n.type, tuple)]
    reads = {i for node in later for i in _called(node).inputs} | set(roots)
    saved = [n for n in done if n in reads]
    extra = [n for n in saved if n not in joint.primals and n not in joint.outputs]
    first = _program("forward", joint.primals, [*joint.outputs, *extra], forward, names)
    gradients = joint.gradients
    second = _program("backward", [*saved, *cotangents], gradients, later, names)
    return Schedule(first, second if later else None, tuple(names[n] for n in saved))


def _program(
    name: str,
    inputs: Sequence[Node],
    outputs: Sequence[Node | None],
    nodes: Sequence[Node],
    names: dict[Node, str],
) -> Program:
    steps: list[Step] = [step for node in nodes if node not in inputs for step in _steps(node, names)]
    returned = [None if o is None else names[o] for o in outputs]
    last = {i: k for k, step in enumerate(steps) if isinstance(step, Call) for i in step.inputs}
    for value, k in sorted(last.items(), key=lambda item: -item[1]):
        if value not in returned and value not in [names[i] for i in inputs]:
            steps.insert(k + 1, Free((value,)))
    buffers = {
        names[n]: Buffer.contiguous(n.tensor) for n in [*inputs, *nodes] if not isinstance(n.type, tuple)
    }
    return Program(name, tuple(names[i] for i in inputs), tuple(returned), tuple(steps), buffers)


def _called(node: Node) -> Node:
    """The node whose op computes `node`: of a projection, its tuple."""
    return node.inputs[0] if node.op.kind is Kind.PROJECTION else node


def _steps(node: Node, names: dict[Node, str]) -> Iterator[Step]:
    if node.op.kind is not Kind.PROJECTION:
        attrs = tuple(zip(node.op.attr_names, node.attrs, strict=True))
        yield Call(node.op.name, tuple(names[i] for i in node.inputs), attrs, (names[node],))
        return
    of = node.inputs[0]
    outputs: list[str | None] = [None] * len(of.type)  # type: ignore[arg-type]
    outputs[node.attr("index")] = names[node]
    attrs = tuple(zip(of.op.attr_names, of.attrs, strict=True))
    yield Call(of.op.name, tuple(names[i] for i in of.inputs), attrs, tuple(outputs))
