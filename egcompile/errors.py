"""The typed errors and warnings of egcompile; each message says what to do about it."""


class EgcompileError(Exception):
    """Base of every error that egcompile raises on purpose."""


class TraceError(EgcompileError):
    """The model cannot be traced as written: control flow on data, a non-tensor output, an in-place input."""


class TypeMismatch(EgcompileError, TypeError):
    """Shapes, dtypes or devices do not fit: at a node of the IR, or at the call of a plan."""


class NoGradientRule(EgcompileError):
    """An op in the path of a needed gradient has no derivative."""


class UnsupportedOp(EgcompileError):
    """An ATen op is outside the registry and opaque nodes are not allowed."""


class CompileError(EgcompileError):
    """A generated kernel did not compile; `source` holds its text."""

    def __init__(self, message: str, source: str = "") -> None:
        super().__init__(f"{message}\n\n{source}" if source else message)
        self.source = source


class ExtractionError(EgcompileError):
    """No plan exists in the e-graph under the given costs; says which root has none."""


class NoSolution(ExtractionError):
    """The solver found no plan in its time; extraction takes another one."""


class SaturationLimit(UserWarning):
    """Rewriting stopped at a limit. The plan is valid, and may miss rewrites."""


class CacheCorrupt(UserWarning):
    """A cache entry could not be read and was made anew."""
