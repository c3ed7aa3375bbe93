"""How much memory a program takes at its peak, from the steps alone."""

from __future__ import annotations

from collections.abc import Collection

from egcompile.schedule.kernel import Call, Free, Launch, Program, View


def peak(program: Program, given: Collection[str]) -> int:
    """The most bytes of values that are alive at once, `given` ones (the caller's) and kernels' own scratch
    memory left out.

    A value is alive until the last name of it or of a view of it is dropped.
    """
    base = {name: name for name in program.inputs}
    names = dict.fromkeys(base, 1)
    alive = sum(program.buffers[name].type.nbytes for name in base if name not in given)
    most = alive
    for step in program.steps:
        match step:
            case Launch() | Call():
                for name in (output for output in step.outputs if output is not None):
                    base[name], names[name] = name, 1
                    alive += program.buffers[name].type.nbytes
            case View():
                base[step.output] = base[step.source]
                names[base[step.output]] += 1
            case Free():
                for name in (base[name] for name in step.names):
                    names[name] -= 1
                    if not names[name] and name not in given:
                        alive -= program.buffers[name].type.nbytes
        most = max(most, alive)
    return most
