"""Triton's interpreter without its repeated bookkeeping: the same values and types, several times sooner.

Of itself the interpreter (3.7) works out a type, a broadcast and a patched language anew for every operation of every
program, and computes every sum of integers again in 64 bits for an assertion that is then dropped, since
`options.debug` is off. Here what depends on types alone is found once, by Triton's own functions, and kept. What is
refused is refused by them, too: nothing is kept of a call that raised. tests/triton/test_interpreter.py holds the two
to each other.
"""
from __future__ import annotations

import numbers
from functools import wraps
from typing import Any

import numpy as np

KEPT = 100_000  # types and pairs of them; a kernel has hundreds


def quicken(interpreter: Any) -> None:
    """Change the interpreter, once."""
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_once(interpreter)
    _know_dtypes(interpreter)
    _keep_types()
    _keep_pairs(interpreter)


def _patch_once(interpreter: Any) -> None:
    """Leave the language patched: it was patched and restored around each launch, and patched anew for each call of a
    function within a kernel. Nothing is compiled in a process that interprets."""
    import triton.language as tl
    patch, done = interpreter._patch_lang, set()
    plain = tl.core.builtin(lambda: None).__code__  # of the wrapper, which only asks for `_semantic`

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is plain else member

        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        setattr(owner, name, bound)

    def patch_lang(function: Any) -> Any:
        if function not in done:
            if not any(value is tl or value is tl.core for value in function.__globals__.values()):
                return patch(function)  # its own complaint
            patch(function)
            done.add(function)
        return interpreter._LangPatchScope()

    interpreter._patch_attr, interpreter._patch_lang = patch_attr, patch_lang


def _know_dtypes(interpreter: Any) -> None:
    look_up, known = interpreter._get_np_dtype, {}

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = np_dtype


def _keep_types() -> None:
    """One object for each type of blocks, which knows the shape that its tensors tell."""
    import triton.language as tl
    block, tensor, constexpr = tl.core.block_type, tl.core.tensor, tl.core.constexpr
    make, unwrap, kept = block.__init__, tl.core._unwrap_if_constexpr, {}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value if kind is tensor or kind is int else value.value if kind is constexpr else unwrap(value)

    def plain(size: Any) -> Any:
        return size.value if type(size) is constexpr else size

    def new(cls: type, element: Any, shape: Any) -> Any:
        key = (element.name, *map(plain, plain(shape)))
        if key not in kept and len(kept) < KEPT:
            found = object.__new__(cls)
            make(found, element, shape)
            kept[key] = found
        return kept.get(key) or object.__new__(cls)

    def init(self: Any, element: Any, shape: Any) -> None:
        if "name" not in self.__dict__:
            make(self, element, shape)

    def told(kind: Any) -> tuple[Any, Any]:
        found = kind.__dict__.get("told")
        if found is None:
            shape = kind.shape if kind.is_block() else ()
            found = kind.told = (tl.core.tuple([constexpr(s) for s in shape]), constexpr(int(np.prod(tuple(shape)))))
        return found

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = told(type)

    tl.core._unwrap_if_constexpr = unwrapped
    block.__new__, block.__init__, tensor.__init__ = new, init, init_tensor


def _keep_pairs(interpreter: Any) -> None:
    """What becomes of the types of two operands."""
    import triton.language as tl
    semantic, tensor = interpreter.TritonSemantic, tl.core.tensor
    check, broadcast, cast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, semantic.cast
    kept: dict[Any, tuple[Any, Any]] = {}

    @wraps(cast)
    def cast_kept(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.type.scalar.name == dst_ty.scalar.name:
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    def fitted(self: Any, value: Any, kind: Any) -> Any:
        """`value` as the type that it had beside such another."""
        if type(value) is not tensor:
            shape = kind.shape.values if kind.is_block() else 1
            data = np.full(shape, value, interpreter._get_np_dtype(kind))
            return tensor(interpreter.TensorHandle(data, kind.scalar), kind)
        value = cast_kept(self, value, kind.scalar)
        if value.type.name == kind.name:
            return value
        if value.type.is_block():
            return tensor(self.builder.create_broadcast(value.handle, kind.shape.values), kind)
        return tensor(self.builder.create_splat(kind, value.handle), kind)

    def holds(value: Any, scalar: Any) -> bool:
        """Whether Triton takes the number as this type without a word."""
        if scalar.is_int():
            return scalar.get_int_min_value() <= value <= scalar.get_int_max_value()
        return scalar.name in ("fp16", "fp32", "fp64")

    @wraps(check)
    def check_kept(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if not left and not isinstance(lhs, numbers.Number) or not right and not isinstance(rhs, numbers.Number):
            return check(self, lhs, rhs, *flags, **named)
        key = (lhs.type.name if left else self.to_tensor_type(lhs),
               rhs.type.name if right else self.to_tensor_type(rhs), flags, *named.values())
        pair = kept.get(key)
        if pair is None or not (left or holds(lhs, pair[0].scalar)) or not (right or holds(rhs, pair[1].scalar)):
            found = check(self, lhs, rhs, *flags, **named)
            if len(kept) < KEPT:
                kept[key] = found[0].type, found[1].type
            return found
        if not left or lhs.type.name != pair[0].name:
            lhs = fitted(self, lhs, pair[0])
        if not right or rhs.type.name != pair[1].name:
            rhs = fitted(self, rhs, pair[1])
        return lhs, rhs

    @wraps(broadcast)
    def broadcast_kept(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.cast = check_kept, cast_kept
    semantic.broadcast_impl_value = broadcast_kept
