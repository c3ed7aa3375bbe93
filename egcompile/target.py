"""What a plan is made for: the device's limits and rates, which the cost model and the generators read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """A device, as far as planning needs it. `Target.parse("cuda:90")` needs no GPU.

    bandwidth      bytes a second through device memory
    flops          dense 16-bit matrix operations a second (`flops_fp32`: without tensor cores)
    launch         seconds that one more kernel costs
    shared_memory  bytes that one program may hold on chip
    l2             bytes that the cache between SMs and memory holds
    """

    name: str
    kind: str
    arch: int
    sms: int
    shared_memory: int
    l2: int
    bandwidth: float
    flops: float
    flops_fp32: float
    launch: float

    @property
    def has_descriptors(self) -> bool:
        """Whether tiles can go through the tensor memory accelerator."""
        return self.arch >= 90

    @staticmethod
    def parse(name: str) -> Target:
        """`cpu`, `cuda:80`, `cuda:90` or `cuda:100`; raises ValueError for others."""
        if name in TARGETS:
            return TARGETS[name]
        raise ValueError(f"unknown target {name!r}; known are {', '.join(TARGETS)}")

    @staticmethod
    def of(device: torch.device) -> Target:
        """The target that a device is: the newest known architecture that it can run."""
        if device.type != "cuda":
            return TARGETS["cpu"]
        major, minor = torch.cuda.get_device_capability(device)
        arch = max((t.arch for t in TARGETS.values() if t.arch <= 10 * major + minor), default=0)
        if not arch:
            raise ValueError(f"compute capability {major}.{minor} is below 8.0")
        return TARGETS[f"cuda:{arch}"]


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("cpu", "cpu", 0, 1, 0, 0, 2e10, 1e11, 1e11, 1e-6),
        Target("cuda:80", "cuda", 80, 108, 163 * 1024, 40_000_000, 1.7e12, 2.5e14, 1.8e13, 2e-6),
        Target("cuda:90", "cuda", 90, 132, 227 * 1024, 50_000_000, 4.2e12, 7.0e14, 5.0e13, 2e-6),
        Target("cuda:100", "cuda", 100, 148, 227 * 1024, 126_000_000, 7.0e12, 1.6e15, 7.0e13, 2e-6),
    )
}
