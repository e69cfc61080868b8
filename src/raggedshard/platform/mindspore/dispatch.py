"""Operations on sharded tensors below autograd: element-wise ones run on the local tensors, others are refused."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor

from raggedshard.platform.mindspore.private import DisableDispatch, no_elements

__all__ = ["run_on_locals"]

_ELEMENTWISE = frozenset(
    """
    Abs Add AddExt AddN AddScalar Addcdiv AddcdivExt Addcmul AddcmulExt BitwiseAnd Cast CastTensor Clone Clamp
    ClampScalar ClampTensor Contiguous Copy Cos Div DivMod DivMods Divs Elu Equal Erf Exp Expm1 Floor FloorDiv
    GeLU GeluExt Greater GreaterEqual GreaterEqualScalar GreaterScalar Identity IsFinite IsInf IsNan Lerp LerpScalar
    Less LessEqual LessEqualScalar LessScalar Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul Muls Neg
    NotEqual OnesLike OnesLikeExt Pow PowScalarTensor PowTensorScalar ReLU RealDiv Reciprocal Round Rsqrt Select Sigmoid
    Sign SiLU Sin Sqrt Square StopGradient Sub SubExt SubScalar Tan Tanh TanhGrad ReluGrad SigmoidGrad SqrtGrad
    RsqrtGrad ReciprocalGrad Where ZerosLike ZerosLikeExt
    """.split()  # noqa: SIM905  a list of names, one to read
)
"""Operators that compute each element of the result from the elements at its place."""

_INTO_FIRST = frozenset(
    """
    Assign AssignAdd AssignSub Adam AdamWeightDecay ApplyAdam ApplyAdaMax ApplyAdadelta ApplyAdagrad ApplyAdagradV2
    ApplyAdamWithAmsgrad ApplyAdamWithAmsgradV2 ApplyCenteredRMSProp ApplyFtrl ApplyGradientDescent ApplyMomentum
    ApplyRMSProp FusedAdam FusedAdamWeightDecay FusedWeightScaleApplyMomentum LARSUpdate Momentum SGD InplaceCopy
    """.split()  # noqa: SIM905
)
"""Operators that update their first operand element by element; optimizers are made of them."""


def run_on_locals(func: Any, args: Any, kwargs: dict[str, Any], tensor_class: type, wrap: Any) -> Any:
    """Run an operator, given that a C++ operator sees a DTensor's local tensor.

    Args:
        tensor_class, wrap: the DTensor class, and what makes one of a local tensor and a spec.

    Raises:
        RuntimeError: it is not element-wise, or its operands do not lie alike.
    """
    operands = [value for value in _flat((args, kwargs)) if isinstance(value, Tensor)]
    sharded = [value for value in operands if isinstance(value, tensor_class)]
    if func.name == "AdamW":
        raise RuntimeError("mint.optim.AdamW has no CPU kernel; use mindspore.experimental.optim.AdamW")
    if func.name not in _ELEMENTWISE and func.name not in _INTO_FIRST:
        raise RuntimeError(
            f"{func.name} on {sharded[0]!r}: only element-wise operations run on a sharded tensor. Take full_tensor() "
            "(on all ranks) or to_local(); a sharded cell's weights are whole in its own construct only"
        )
    spec: Any = sharded[0]._spec
    for value in operands:
        _check_operand(func.name, value, spec, isinstance(value, tensor_class))
    local_shape = tuple(sharded[0]._shape)
    with DisableDispatch():
        out = func(*args, **kwargs)
    if func.name in _INTO_FIRST:
        return out
    return _map(out, lambda t: wrap(_kept(t), spec) if tuple(t._shape) == local_shape else t)


def _kept(local: Tensor) -> Tensor:
    """A result, safe for what comes next: optimizers need a zero behind no elements (see `no_elements`)."""
    return local if local.size else no_elements(local.shape, local.dtype)


def _check_operand(name: str, value: Any, spec: Any, is_sharded: bool) -> None:
    if is_sharded:
        value._require_values()
        if value._spec != spec:
            raise RuntimeError(
                f"{name}: operands lie as {spec.placements} of {spec.shape} and as {value.placements} of "
                f"{value.shape}; redistribute one"
            )
    elif value.size != 1:
        raise RuntimeError(
            f"{name}: got a DTensor of shape {spec.shape} and a plain tensor of shape {tuple(value.shape)}; convert "
            "the plain tensor with distribute_tensor, or take to_local() or full_tensor() of the other"
        )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _map(value: Any, fn: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, fn) for item in value)
    return fn(value) if isinstance(value, Tensor) else value
