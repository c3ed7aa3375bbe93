"""From a saturated e-graph and costs to the cheapest joint plan: which equal forms, kernels and memory."""

from egcompile.extract.extraction import Extraction, KernelPlan, Stats, extract
from egcompile.extract.fusible import fusible

__all__ = ["Extraction", "KernelPlan", "Stats", "extract", "fusible"]
