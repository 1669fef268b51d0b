"""Triton's interpreter without work that it does over and over, which is most of the time that our kernels' tests take, and
with products of bfloat16.

A launch replaces the functions of Triton's language by interpreted ones, and every call of one kernel function by another does so again.
Every sum of integers is computed three times more, for an assertion that is off. Every tensor works out the type of its shape, which
nobody asks for, every type its name and its size, and two tensors of one type are compared, converted and broadcast as if they had two.
A number beside a tensor becomes a tensor each time, and what wraps each function of the language looks for arguments that are there.
What two shapes or a conversion come to is found anew for every pair, and arrays are broadcast and widened by numpy's general functions.
It keeps bfloat16 as its bits and multiplies these; here it multiplies the numbers.
"""

from __future__ import annotations

from functools import cache, partial


def quicken() -> None:
    """For Triton 3.6 on; a version that has it otherwise is left alone. To be called before any kernel runs."""
    try:
        import triton.language as tl
        from triton.language.semantic import TritonSemantic
        from triton.runtime import interpreter

        replaced = interpreter._patch_lang, interpreter._LangPatchScope, interpreter._get_np_dtype
        wrapped = interpreter._patch_attr, interpreter.TensorHandle.__post_init__
        shapes = tl.core.tuple.__init__, tl.core.tuple.__getattr__, tl.core._type_for_tuple_values
        semantics = (TritonSemantic.binary_op_type_checking_impl, TritonSemantic.binary_op_sanitize_overflow_impl,
                     TritonSemantic.computation_type_impl, TritonSemantic.broadcast_impl_value, TritonSemantic.cast,
                     TritonSemantic.to_tensor, tl.core._unwrap_if_constexpr)
        builder = interpreter.InterpreterBuilder
        arrays = builder.cast_impl, builder.create_expand_dims
    except (ImportError, AttributeError):
        return
    _replace_once(tl, interpreter, *replaced[:2])
    _unwrapped(interpreter, TritonSemantic, *wrapped)
    _remember_dtypes(tl, interpreter, replaced[2])
    _type_when_asked(tl.core.tuple, *shapes)
    _as_they_are(tl, TritonSemantic, *semantics)
    _types_once(tl)
    _arrays(tl, interpreter, *arrays)
    _multiply_numbers(tl, interpreter)


def _replace_once(tl, interpreter, replace, nothing) -> None:
    modules: dict = {}

    def unless_done(fn):
        # A function of the language is no builtin while another stands in for it.
        if fn not in modules:
            modules[fn] = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        seen = modules[fn]
        return replace(fn) if not seen or any(tl.core.is_builtin(lang.load) for lang in seen) else nothing()

    interpreter._patch_lang = unless_done


def _unwrapped(interpreter, semantic, *_) -> None:
    def patch(obj, name, member, builder, scope):
        fn, given = getattr(member, "__wrapped__", member), {"_semantic": semantic(builder)}
        scope.set_attr(obj, name, lambda *args, **kwargs: fn(*args, **(kwargs | given)))

    interpreter._patch_attr = patch
    # That its numbers are no wider than its type.
    interpreter.TensorHandle.__post_init__ = lambda self: None


def _remember_dtypes(tl, interpreter, look_up) -> None:
    known: dict = {}

    def of(dtype):
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return look_up(scalar)
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = of


def _type_when_asked(shape, make, attribute, type_of) -> None:
    def init(self, args, type=None):
        if type is None:
            self.values = list(args)
        else:
            make(self, args, type)

    def getattr(self, name):
        if name == "type":
            self.type = type_of(self.values)
            return self.type
        return attribute(self, name)

    shape.__init__, shape.__getattr__ = init, getattr


def _as_they_are(tl, semantic, both, overflow, computed, broadcast, cast, to_tensor, unwrap) -> None:
    """Of two operands those of one type, which need no conversion, and int32 beside int64, which is what addresses are made of; a number
    as a tensor like the one beside it, which is made once; conversions that are numpy's; and what no compiler has wrapped."""
    import numpy as np
    from triton.runtime import interpreter

    tensor, numbers, integers, handle = tl.tensor, {}, {"int32", "int64"}, interpreter.TensorHandle
    converted_by_numpy = {"fp16", "fp32", "fp64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    shapes: dict = {}

    def unless_same(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        if not div_or_mod and lhs.__class__ is tensor and rhs.__class__ is tensor:
            one, other = lhs.dtype, rhs.dtype
            if one.is_ptr():
                if allow_lhs_ptr and other.name in integers:
                    return unless_equal(self, lhs, rhs)
            elif vars(lhs.type) is vars(rhs.type):
                return lhs, rhs
            elif one.name == other.name:
                return unless_equal(self, lhs, rhs)
            elif arithmetic_check and one.name in integers and other.name in integers:
                return unless_equal(self, widened(lhs), widened(rhs))
        elif not div_or_mod and lhs.__class__ is tensor and rhs.__class__ in (int, float) and not lhs.dtype.is_ptr():
            return beside(self, lhs, rhs, arithmetic_check)
        elif not div_or_mod and rhs.__class__ is tensor and lhs.__class__ in (int, float) and not rhs.dtype.is_ptr():
            return beside(self, rhs, lhs, arithmetic_check)[::-1]
        return both(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def beside(self, x, number, arithmetic_check):
        # Types of blocks share what they hold, for good.
        like = id(vars(x.type)) if x.type.is_block() else x.dtype.name
        key = like, arithmetic_check, number if number.__class__ is int else number.hex()
        found = numbers.get(key)
        if found is None:
            converted, found = both(self, x, number, arithmetic_check=arithmetic_check)
            if converted is not x:
                return converted, found
            numbers[key] = found
        return x, found

    def if_asserted(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            overflow(self, lhs, rhs, binary_op)

    def widened(x):
        if x.dtype.name == "int64":
            return x
        return tensor(x.handle.__class__(x.handle.data.astype(np.int64), tl.int64),
                      x.type.with_element_ty(tl.int64) if x.type.is_block() else tl.int64)

    def unless_equal(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        alike = a.shape.values == b.shape.values if a.is_block() and b.is_block() else not a.is_block() and not b.is_block()
        if alike:
            return lhs, rhs
        # Types of blocks share what they hold, and scalars are told by their names.
        key = id(vars(a)) if a.is_block() else a.name, id(vars(b)) if b.is_block() else b.name
        if key not in shapes:
            one, other = broadcast(self, lhs, rhs)
            shapes[key] = one.type, other.type, tuple(one.type.shape)
            return one, other
        one, other, shape = shapes[key]
        return spread(lhs, one, shape), spread(rhs, other, shape)

    def spread(x, type, shape):
        if vars(x.type) is vars(type):
            return x
        data = x.handle.data
        out = np.empty(shape, data.dtype)
        out[...] = data
        return tensor(handle(out, x.dtype), type)

    def unless_cast(self, input, dst_ty, *rounding):
        source, scalar = input.dtype, dst_ty.scalar
        if source is scalar:
            return input
        if not rounding and source.name in converted_by_numpy and scalar.name in converted_by_numpy:
            if source.name == scalar.name:
                return input
            data = input.handle.data.astype(interpreter._get_np_dtype(scalar))
            return tensor(handle(data, scalar), input.type.with_element_ty(scalar) if input.type.is_block() else scalar)
        return cast(self, input, dst_ty, *rounding)

    unwrapped = int, float, bool, str, type(None), tensor

    semantic.binary_op_type_checking_impl = unless_same
    semantic.binary_op_sanitize_overflow_impl = if_asserted
    semantic.broadcast_impl_value, semantic.cast = unless_equal, unless_cast
    semantic.to_tensor = lambda self, x, *check: x if x.__class__ is tensor else to_tensor(self, x, *check)
    # Of scalar types, which are few.
    remembered = cache(partial(computed, semantic(None)))
    semantic.computation_type_impl = lambda self, *types: remembered(*types)
    tl.core._unwrap_if_constexpr = lambda o: o if o.__class__ in unwrapped else unwrap(o)


def _types_once(tl) -> None:
    """What a type comes to, once for each kind of element and shape; equal types share it."""
    block, tensor, scalar = tl.block_type, tl.tensor, tl.core.dtype
    make, fill, equal = block.__init__, tensor.__init__, block.__eq__
    known: dict = {}

    def init(self, element_ty, shape):
        key = element_ty.name, *[size if size.__class__ is int else tl.core._unwrap_if_constexpr(size) for size in shape]
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    def of_type(self, handle, type):
        kept = type.__dict__
        if "of_tensors" not in kept:
            fill(self, handle, type)
            kept["of_tensors"] = {name: getattr(self, name) for name in ("shape", "numel", "type", "dtype")}
        self.handle = handle
        self.__dict__ |= kept["of_tensors"]

    block.__init__, tensor.__init__ = init, of_type
    block.__eq__ = lambda self, other: self.__dict__ is getattr(other, "__dict__", None) or equal(self, other)
    same = scalar.__eq__
    scalar.__eq__ = lambda self, other: self is other or same(self, other)


def _arrays(tl, interpreter, cast, expand) -> None:
    """What numpy does by itself: float32 cut to the bits of bfloat16 and back, and another axis."""
    import numpy as np

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def unless_bits(self, src, dst_type):
        source, scalar = src.dtype.scalar, dst_type.scalar
        if source.name == "bf16" and scalar.name == "fp32":
            return handle((src.data.astype(np.uint32) << 16).view(np.float32), scalar)
        if source.name == "fp32" and scalar.name == "bf16":
            return handle((src.data.view(np.uint32) >> 16).astype(np.uint16), scalar)
        return cast(self, src, dst_type)

    def expanded(self, arg, axis):
        shape = arg.data.shape
        return handle(arg.data.reshape((*shape[:axis], 1, *shape[axis:])), arg.dtype.scalar) if axis >= 0 else expand(self, arg, axis)

    builder.cast_impl, builder.create_expand_dims = unless_bits, expanded


def _multiply_numbers(tl, interpreter) -> None:
    import numpy as np

    multiply = interpreter.InterpreterBuilder.create_dot

    def number(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: multiply(self, number(a), number(b), *rest)
