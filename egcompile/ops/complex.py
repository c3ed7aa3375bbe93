"""What the derivative itself computes of complex numbers. All else is ATen's, in opaque nodes."""

import torch

from egcompile.ops.opdef import Kind, OpDef, Sample, register, same_type

add_complex = register(
    OpDef(
        "add_complex",
        Kind.EXTERN,
        ("a", "b"),
        type_rule=same_type,
        evaluate=torch.add,
        samples=(Sample(("f64[3,4]", "f64[3,4]")),),
    )
)
"""The sum of two cotangents, as a call: no generated kernel holds complex numbers."""
