"""Which kernels run in the forward and which in the backward; what is saved between them, what recomputed."""

from egcompile.partition.parts import Partition, base, partition

__all__ = ["Partition", "base", "partition"]
