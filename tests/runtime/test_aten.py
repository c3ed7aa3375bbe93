"""Where results of calls lie, and as what they are handed on."""

from __future__ import annotations

import pytest
import torch

from egcompile.runtime.aten import has_strides, unviewed


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_unviewed_lies_where_it_lay(inference: bool) -> None:
    with torch.inference_mode(inference):
        base = torch.arange(24.0)
        view = base.as_strided((3, 1, 2), (2, 7, 10), 3)
        made = unviewed(view)
        assert made.is_inference() == inference
        assert not made._is_view() and not made.requires_grad
        assert (made.shape, made.stride(), made.data_ptr()) == (view.shape, view.stride(), view.data_ptr())
        made.add_(1)
        assert torch.equal(view, made) and base[3] == 4
        assert made.squeeze_(1).shape == (3, 2), "its sizes are its own"
        assert view.shape == (3, 1, 2)


def test_what_is_unviewed_may_change_in_place_under_autograd() -> None:
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return unviewed((x / 2).as_strided((4,), (1,)))

        @staticmethod
        def backward(ctx: object, ct: torch.Tensor) -> torch.Tensor:
            return ct.reshape(2, 2) / 2

    x = torch.ones(2, 2, requires_grad=True)
    y = Half.apply(x)
    y.mul_(3)
    y.sum().backward()
    assert x.grad is not None and (x.grad == 1.5).all()


def test_strides_of_single_elements_do_not_matter() -> None:
    x = torch.zeros(2, 1, 3)
    for strides, found in {(3, 3, 1): True, (3, 99, 1): True, (3, 3, 2): False, (6, 3, 1): False}.items():
        assert has_strides(x, strides) == found
