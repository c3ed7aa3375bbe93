"""The derivative of the binary cross-entropy of probabilities: ATen bounds it in `x`, not in `target`."""

from egcompile.ops import binary_cross_entropy, binary_cross_entropy_backward, log, log1p, mul, neg, sub
from egcompile.rules.rule import vjp

vjp(
    binary_cross_entropy,
    lambda x, target, ct: (
        binary_cross_entropy_backward(x, target, ct),
        mul(ct, sub(log1p(neg(x)), log(x))),
    ),
)
