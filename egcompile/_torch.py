"""Torch's private parts that the package's API uses."""

from torch._dynamo import register_backend

__all__ = ["register_backend"]
