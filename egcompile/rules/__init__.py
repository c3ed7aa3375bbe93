"""Rewrite rules, as data. `RULES` holds the equations by name, `VJPS` the derivatives.

The discipline of rules:

1. *The equation first.* A rule is a function from variables to equations; its docstring states them. A
   condition stands in the rule, beside the equation that needs it.
2. *The right side is never worse* than the left for some plan: fewer kernels, less traffic, or a form that
   another rule turns into that. A rule only adds the choice; cost makes it.
3. *Every e-node is correct, always.* Rank, dtype, eps and axis are in the pattern: a rule that forgets the
   rank drops a batch axis, sometimes. `x * 0` is not 0, for x may be NaN.
4. *No commutativity or associativity.* They grow without bound. Write the few variants that programs have;
   a loop over rows with names will do. PyTorch puts a constant on the right, so rules look for it there.
5. *A rule that fuses several outputs unions each of them*, in one rule. An output that may not be there, such
   as a gradient that nobody asked for, has a row of its own: a left side must be in the graph.
6. *Rounding is not a detail.* `exact`: the same operations in the same order, with no cast gained or lost
   that rounds. `reassociating`: the same real numbers, added or multiplied in another order (the last bits
   differ). `approximate`: other rounding, and only on request. (Equal is equal under `==`: -0 is 0.)
7. *A recognition rule has one gradient on both sides*, ties included, for it runs before the derivative.
   maximum(x, 0) is relu in value only, and is no such rule.
8. *One family a file*, and each rule an example to fire on: tests evaluate both sides on it, and run it in
   the e-graph alone.

Families: `recognition` (written-out forms of named ops), `algebra`, `movement`, `fusion`; `backward` has the
derivatives.
"""

from egcompile.rules import algebra, backward, channel_norm, convolution, loss, movement
from egcompile.rules.fusion import layer_norm, linear, linear_backward, norm_cast, softmax_cast
from egcompile.rules.fusion import norm as fused_norm
from egcompile.rules.recognition import activation, attention, norm, softmax
from egcompile.rules.rule import RULES, VJPS, Equations, Rule, Vjp, rule, vjp

__all__ = ["RULES", "VJPS", "Equations", "Rule", "Vjp", "rule", "vjp"]
