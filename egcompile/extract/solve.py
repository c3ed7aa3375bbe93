"""Solves a 0/1 program of clauses: propagation, independent parts, and HiGHS on each part that differs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from egcompile.errors import ExtractionError, NoSolution
from egcompile.extract.program import Program

THREADS = 1
"""Threads of HiGHS, the same for each call: it ignores a change within a process. The parts are small."""

_OPTIONS: dict[str, bool | int | float] = {
    "threads": THREADS,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-7,
    "mip_heuristic_run_feasibility_jump": False,  # slower than all the rest, and there is a seed
}

NO_PLAN = "no plan satisfies every constraint of the extraction program"

Row = tuple[tuple[int, ...], tuple[int, ...], int]
"""(variables with +1, variables with -1, lower bound of their sum)"""


@dataclass(frozen=True)
class Solution:
    """Values of the variables; `bound` is what no plan can go below; `parts`, `solved` count components."""

    values: list[int]
    objective: float
    bound: float
    parts: int
    solved: int

    @property
    def gap(self) -> float:
        """Of the objective to the bound, relative to the former."""
        return (self.objective - self.bound) / self.objective if self.objective > self.bound else 0.0


def solve(program: Program, seed: Sequence[int] | None, time_limit: float) -> Solution:
    """The best values; those of `seed` for a part that the time was too short for.

    Raises ExtractionError where there are none, NoSolution where none was found in time and there is no seed.
    """
    deadline = time.perf_counter() + time_limit
    values, rows = propagate(program)
    objective = bound = sum(c for c, v in zip(program.cost, values) if v == 1)
    known: dict[object, tuple[list[int], float]] = {}
    parts = components(len(values), rows)
    for variables, inside in parts:
        costs = [program.cost[v] for v in variables]
        local = {v: i for i, v in enumerate(variables)}
        shape = tuple(
            (tuple(local[v] for v in plus), tuple(local[v] for v in minus), least)
            for plus, minus, least in (rows[r] for r in inside)
        )
        key = (tuple(costs), shape)
        if key not in known:
            inherited = None if seed is None else [seed[v] for v in variables]
            known[key] = _solve_part(costs, shape, inherited, deadline - time.perf_counter())
        found, lower = known[key]
        for v, value in zip(variables, found):
            values[v] = value
        objective += sum(c for c, v in zip(costs, found) if v)
        bound += lower
    return Solution([max(v, 0) for v in values], objective, min(bound, objective), len(parts), len(known))


def propagate(program: Program) -> tuple[list[int], list[Row]]:
    """Values that are forced (-1: open), and the rows that remain between open variables.

    A variable that no open clause asks for is 0, since none has a negative cost.
    """
    count = len(program.cost)
    values = [-1] * count
    asks: list[list[int]] = [[] for _ in range(count)]
    conditions: list[list[int]] = [[] for _ in range(count)]
    limited: list[list[int]] = [[] for _ in range(count)]
    asked = [0] * count
    options = [len(then) for _, then in program.clauses]
    doubts = [len(given) for given, _ in program.clauses]
    holds = [not given for given, _ in program.clauses]
    dead = [False] * len(program.clauses)
    ones = [0] * len(program.limits)
    queue: deque[tuple[int, int]] = deque()

    def settle(v: int, value: int) -> None:
        if values[v] == -1:
            values[v] = value
            queue.append((v, value))
        elif values[v] != value:
            raise ExtractionError(NO_PLAN)

    def retire(i: int) -> None:
        if not dead[i]:
            dead[i] = True
            for v in program.clauses[i][1]:
                asked[v] -= 1
                if not asked[v] and values[v] == -1:
                    settle(v, 0)

    def look(i: int) -> None:
        if dead[i]:
            return
        given, then = program.clauses[i]
        if not options[i]:
            if holds[i]:
                raise ExtractionError(NO_PLAN)
            for v in given:
                settle(v, 0)
        elif options[i] == 1 and holds[i]:
            settle(next(v for v in then if values[v] != 0), 1)

    for i, (given, then) in enumerate(program.clauses):
        for v in then:
            asks[v].append(i)
            asked[v] += 1
        for v in given:
            conditions[v].append(i)
    for i, (variables, _) in enumerate(program.limits):
        for v in variables:
            limited[v].append(i)
    for v in range(count):
        if not asked[v]:
            settle(v, 0)
    for i in range(len(program.clauses)):
        look(i)
    while queue:
        v, value = queue.popleft()
        if value:
            for i in asks[v]:
                retire(i)
            for i in conditions[v]:
                holds[i] = True
                look(i)
            for i in limited[v]:
                ones[i] += 1
                variables, most = program.limits[i]
                if ones[i] > most:
                    raise ExtractionError(NO_PLAN)
                if ones[i] == most:
                    for w in variables:
                        if values[w] == -1:
                            settle(w, 0)
        else:
            for i in conditions[v]:
                doubts[i] -= 1
                if not doubts[i]:
                    retire(i)
            for i in asks[v]:
                options[i] -= 1
                look(i)
    rows: list[Row] = []
    for i, (given, then) in enumerate(program.clauses):
        if not dead[i]:
            open_then = tuple(v for v in then if values[v] == -1)
            open_given = () if holds[i] else tuple(v for v in given if values[v] == -1)
            rows.append((open_then, open_given, int(holds[i])))
    for i, (variables, most) in enumerate(program.limits):
        open_variables = tuple(v for v in variables if values[v] == -1)
        if len(open_variables) > most - ones[i]:
            rows.append(((), open_variables, ones[i] - most))
    return values, rows


def components(count: int, rows: Sequence[Row]) -> list[tuple[list[int], list[int]]]:
    """Groups of variables that share rows, each as (its variables, its rows)."""
    parent = list(range(count))

    def find(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for plus, minus, _ in rows:
        both = (*plus, *minus)
        first = find(both[0])
        for v in both[1:]:
            parent[find(v)] = first
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for r, (plus, minus, _) in enumerate(rows):
        groups.setdefault(find((plus or minus)[0]), ([], []))[1].append(r)
    for v in range(count):
        if (group := groups.get(find(v))) is not None:
            group[0].append(v)
    return list(groups.values())


class _Quiet(highspy.Highs):  # type: ignore[misc]  # highspy has no types
    """HiGHS without its banner: the constructor enables callbacks, and that prints it if output is on."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


def _solve_part(
    costs: Sequence[float], rows: Sequence[Row], seed: Sequence[int] | None, seconds: float
) -> tuple[list[int], float]:
    """The best values of one component, and a lower bound of their cost.

    `seed` is not given to HiGHS: where its presolve meets a start, HiGHS 1.16 calls a wrong value optimal.
    It is what is taken when the time is too short to find better.
    """
    count = len(costs)
    highs = _Quiet()
    for option, value in _OPTIONS.items():
        highs.setOptionValue(option, value)
    highs.setOptionValue("time_limit", max(seconds, 0.01))
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(p) + len(m) for p, m, _ in rows], out=starts[1:])
    index = np.fromiter((v for p, m, _ in rows for v in (*p, *m)), dtype=np.int32, count=int(starts[-1]))
    signs = (s for p, m, _ in rows for s in (*(1.0 for _ in p), *(-1.0 for _ in m)))
    entries = np.fromiter(signs, dtype=np.float64, count=int(starts[-1]))
    lower = np.asarray([least for _, _, least in rows], dtype=np.float64)
    cost = np.asarray(costs, dtype=np.float64)
    passed = highs.passModel(
        count,
        len(rows),
        int(starts[-1]),
        int(highspy.MatrixFormat.kRowwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        cost,
        np.zeros(count),
        np.ones(count),
        lower,
        np.full(len(rows), highspy.kHighsInf),
        starts,
        index,
        entries,
        np.full(count, int(highspy.HighsVarType.kInteger), dtype=np.int32),
    )
    ran = highs.run()
    if highspy.HighsStatus.kError in (passed, ran):
        raise ExtractionError("HiGHS refuses the extraction program; was it run with other threads before?")
    model, info = highs.getModelStatus(), highs.getInfo()
    if model == highspy.HighsModelStatus.kInfeasible:
        raise ExtractionError(NO_PLAN)
    optimal = model == highspy.HighsModelStatus.kOptimal
    seeded = float("inf") if seed is None else float(cost @ np.asarray(seed))
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values = np.asarray(highs.getSolution().col_value) > 0.5
        found = float(cost @ values)
        sums = np.add.reduceat(entries * values[index], starts[:-1])
        if np.any(sums < lower) or abs(found - info.objective_function_value) > 1e-6 * max(found, 1.0):
            raise ExtractionError("HiGHS returned values that are no solution of the extraction program")
        if optimal or found <= seeded:
            return values.astype(int).tolist(), found if optimal else max(float(info.mip_dual_bound), 0.0)
    if seed is None:
        raise NoSolution(f"HiGHS found no plan in {seconds:.1f} s ({highs.modelStatusToString(model)})")
    return list(seed), max(float(info.mip_dual_bound), 0.0)
