"""From a plan to kernels and the straight lines of steps that launch them."""

from egcompile.schedule.emit import schedule
from egcompile.schedule.kernel import Buffer, Call, Free, Kernel, Launch, Program, Schedule, Step, View

__all__ = ["Buffer", "Call", "Free", "Kernel", "Launch", "Program", "Schedule", "Step", "View", "schedule"]
