"""The ceilings of this machine: `python -m benchmarks.environment`."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def versions() -> dict[str, str]:
    """What a result must carry to be comparable later."""
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def milliseconds(run: Callable[[], Any], rounds: int = 20) -> float:
    """The median time of `run` on the device, over warm rounds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def copy_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes a second of a device copy, read and written."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def matmul_rate(size: int = 8192) -> float:
    """Operations a second of a bf16 product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) * 1e3


def attention() -> dict[str, Any]:
    """Milliseconds of each causal attention kernel, forward and backward, 4 x 2048 tokens, 16 and 8 heads."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        torch.randn(4, 2048, heads, 128, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .detach()
        .requires_grad_()
        for heads in (16, 8, 8)
    )
    every = [b for name, b in SDPBackend.__members__.items() if name not in ("ERROR", "OVERRIDEABLE")]
    choices = {"default": every} | {b.name: [b] for b in every if b.name != "MATH"}

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def timed(backends: list[Any]) -> dict[str, Any]:
        with sdpa_kernel(backends):
            out = forward()
            ct = torch.randn_like(out)

            def backward() -> Any:
                return torch.autograd.grad(out, (q, k, v), ct, retain_graph=True)

            node = out.grad_fn.name() if out.grad_fn else ""
            return {"node": node, "forward": milliseconds(forward), "backward": milliseconds(backward)}

    rows: dict[str, Any] = {}
    for name, backends in choices.items():
        try:
            rows[name] = timed(backends)
        except RuntimeError as error:
            rows[name] = {"error": str(error)[:200]}
    return rows


def command(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, as it is written."""
    head, _, rest = (doc or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=head, epilog=rest, formatter_class=raw)


def needs_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends a command with its usage where there is no GPU."""
    if not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    needs_gpu(parser)
    result = {
        **versions(),
        "copy_TBs": copy_bandwidth() / 1e12,
        "matmul_TFLOPs": matmul_rate() / 1e12,
        "attention": attention(),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
