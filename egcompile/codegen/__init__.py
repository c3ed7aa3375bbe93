"""Kernels as Triton source: a kernel and a target in, text out. Needs no GPU, no Triton and no egglog."""

from egcompile.codegen.division import generate
from egcompile.codegen.gemm_config import GemmConfig
from egcompile.codegen.heuristics import Config
from egcompile.codegen.source import KernelSource

__all__ = ["Config", "GemmConfig", "KernelSource", "generate"]
