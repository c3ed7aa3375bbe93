"""The ops: one declaration each, in a registry that drives the e-graph, the kernels and the tests."""

from egcompile.ir.types import TensorType, accumulate_dtype
from egcompile.ops.activation import (
    ACTIVATIONS,
    gelu,
    gelu_backward,
    gelu_tanh,
    gelu_tanh_backward,
    relu,
    relu_backward,
    sigmoid,
    sigmoid_backward,
    silu,
    silu_backward,
    tanh,
    tanh_backward,
)
from egcompile.ops.attention import sdpa, sdpa_backward
from egcompile.ops.build import broadcast_to, cast_to, constant, reshape_to
from egcompile.ops.channel_norm import (
    batch_moments,
    batch_norm,
    batch_norm_sums,
    group_moments,
    group_norm,
    group_norm_sums,
    group_norm_terms,
)
from egcompile.ops.complex import add_complex
from egcompile.ops.contraction import bmm, contract_rows, matmul
from egcompile.ops.convolution import convolution, convolution_transpose, convolution_weight_grad
from egcompile.ops.core import full, input, iota, out
from egcompile.ops.evaluate import call, evaluate, evaluate_nodes
from egcompile.ops.extremum import amax_backward, amin_backward
from egcompile.ops.fused import (
    linear_act,
    linear_act_backward,
    linear_add,
    linear_bias_add,
    linear_swiglu,
    linear_swiglu_backward,
    swiglu,
    swiglu_backward,
)
from egcompile.ops.indexing import embedding, embedding_backward
from egcompile.ops.layer_norm import (
    add_layer_norm,
    layer_norm,
    layer_norm_backward,
    layer_norm_backward_add,
)
from egcompile.ops.loss import (
    binary_cross_entropy,
    binary_cross_entropy_backward,
    cross_entropy,
    cross_entropy_backward,
    log_softmax,
    log_softmax_backward,
    softmax,
    softmax_backward,
)
from egcompile.ops.movement import cat, expand, pad, permute, reshape, slice_, transpose
from egcompile.ops.norm import add_rms_norm, rms_norm, rms_norm_backward, rms_norm_backward_add
from egcompile.ops.opdef import REGISTRY, Kind, OpDef, Sample, ops_of, register
from egcompile.ops.pointwise import (
    abs,
    add,
    cast,
    cos,
    div,
    eq,
    erf,
    exp,
    expm1,
    ge,
    gt,
    le,
    log,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    neg,
    pow,
    reciprocal,
    rsqrt,
    sin,
    sqrt,
    stop_gradient,
    sub,
    where,
)
from egcompile.ops.pooling import max_pool2d, max_pool2d_backward, max_pool2d_pick
from egcompile.ops.random import dropout_mask
from egcompile.ops.reduction import amax, amin, mean, sum
from egcompile.ops.term import AttrFunction, AttrTerm, Pattern, Term, Var, dtype, is_pattern, shape
