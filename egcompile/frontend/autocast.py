"""What autocast does inside of an op that is kept whole, as explicit casts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from egcompile.frontend._torch import example

LOSSES = frozenset({F.cross_entropy, torch.ops.aten.cross_entropy_loss.default})


def cast_before_losses(gm: fx.GraphModule) -> None:
    """`loss: f32 = cross_entropy(logits: bf16)`  -->  `cross_entropy(to(logits, f32))`.

    On CUDA autocast knows only the log-softmax and the NLL inside of a cross-entropy, both in fp32, so
    that the loss kept whole would come out in the logits' dtype. All other ops kept whole either have
    an autocast rule themselves or hold nothing that has one.
    """
    for body in gm.modules():
        if isinstance(body, fx.GraphModule):
            for node in body.graph.nodes:
                if node.target in LOSSES:
                    _cast_logits(body, node)
            body.recompile()


def _cast_logits(gm: fx.GraphModule, node: fx.Node) -> None:
    logits = node.args[0] if node.args else node.kwargs["input"]
    assert isinstance(logits, fx.Node)
    given, result = example(logits), example(node)
    if isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor) and given.dtype != result.dtype:
        with gm.graph.inserting_before(node):
            cast = gm.graph.call_function(torch.ops.aten.to.dtype, (logits, result.dtype))
        cast.meta = {key: value for key, value in node.meta.items() if key not in ("val", "example_value")}
        node.replace_input_with(logits, cast)
