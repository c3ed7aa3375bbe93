"""Written-out forms of named ops, recognized before the backward is derived: their derivatives are shorter.

Each has one gradient on both sides, not only one value. So there is none for relu as maximum(x, 0) or
clamp(x, 0), whose gradients at 0 are 1/2 and 1, nor as where(x > 0, x, 0), which loses a NaN.
"""
