"""A few words to write LLVM's instructions with: addresses, loops, and vectors of equal numbers."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, POINTER, VOID = ir.FloatType(), ir.PointerType(), ir.VoidType()
Value = Any  # llvmlite has no types


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BF16 = _BFloat()


def vector(element: ir.Type, lanes: int) -> ir.Type:
    """<lanes x element>."""
    return ir.VectorType(element, lanes)


def filled(type_: ir.Type, number: float) -> Value:
    """A vector of equal numbers."""
    return ir.Constant(type_, [number] * type_.count)


def const(number: int) -> Value:
    """A number of 64 bits."""
    return ir.Constant(I64, number)


class Code:
    """A function of a module that takes one address, written from its first instruction to its last."""

    def __init__(self, module: ir.Module, name: str) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(VOID, [POINTER]), name)
        self.build = ir.IRBuilder(self.function.append_basic_block("entry"))

    @property
    def argument(self) -> Value:
        """The address."""
        return self.function.args[0]

    def pointer(self, address: Value) -> Value:
        """A pointer to this address."""
        return self.build.inttoptr(address, POINTER)

    def at(self, place: Value, offset: Value | int) -> Value:
        """The address `offset` bytes behind another one."""
        return self.build.gep(place, [_value(offset)], source_etype=I8)

    def load(self, type_: ir.Type, place: Value, offset: Value | int = 0, align: int = 1) -> Value:
        """What lies there."""
        return self.build.load(self.at(place, offset), align=align, typ=type_)

    def store(self, value: Value, place: Value, offset: Value | int = 0, align: int = 1) -> None:
        """Have it lie there."""
        self.build.store(value, self.at(place, offset), align=align)

    def prefetch(self, place: Value, offset: Value | int) -> None:
        """Have a line of 64 bytes read into the caches; it may be outside of any memory."""
        to_read, near, data = (ir.Constant(I32, number) for number in (0, 3, 1))
        self.call("llvm.prefetch.p0", VOID, self.at(place, offset), to_read, near, data)

    def shuffle(self, one: Value, other: Value, numbers: Sequence[int]) -> Value:
        """Elements of two vectors, by their numbers: those of the other come behind those of the one."""
        places = [ir.Constant(I32, number) for number in numbers]
        return self.build.shuffle_vector(one, other, ir.Constant(vector(I32, len(places)), places))

    def times(self, one: Value, other: Value | int) -> Value:
        """A product of 64 bits."""
        return self.build.mul(one, _value(other))

    def plus(self, one: Value, other: Value | int) -> Value:
        """A sum of 64 bits."""
        return self.build.add(one, _value(other))

    def spread(self, value: Value, lanes: int) -> Value:
        """A vector of equal lanes."""
        type_ = vector(value.type, lanes)
        one = self.build.insert_element(ir.Constant(type_, ir.Undefined), value, ir.Constant(I32, 0))
        return self.build.shuffle_vector(one, one, filled(vector(I32, lanes), 0))

    def call(self, name: str, returns: ir.Type, *arguments: Value) -> Value:
        """What a function returns that LLVM knows, or that the program finds by its name."""
        function = self.module.globals.get(name)
        if function is None:
            types = [argument.type for argument in arguments]
            function = ir.Function(self.module, ir.FunctionType(returns, types), name)
        return self.build.call(function, arguments)

    def loop(
        self,
        start: Value | int,
        stop: Value | int,
        step: int,
        body: Callable[..., Sequence[Value] | None],
        *carried: Value,
    ) -> list[Value]:
        """body(i, *carried) for i = start, start + step, ... below `stop`; it returns the next `carried`.

        Returns the last ones, i before them.
        """
        build, begin, end = self.build, _value(start), _value(stop)
        before = build.block
        test, inside, after = (self.function.append_basic_block(name) for name in ("test", "inside", "after"))
        build.branch(test)
        build.position_at_end(test)
        values = [build.phi(I64), *(build.phi(value.type) for value in carried)]
        for value, first in zip(values, [begin, *carried], strict=True):
            value.add_incoming(first, before)
        build.cbranch(build.icmp_signed("<", values[0], end), inside, after)
        build.position_at_end(inside)
        following = [self.plus(values[0], step), *(body(*values) or ())]
        for value, each in zip(values, following, strict=True):
            value.add_incoming(each, build.block)
        build.branch(test)
        build.position_at_end(after)
        return values

    def while_below(self, stop: Value, first: Value, body: Callable[[Value], Value]) -> None:
        """body(number), which returns the next number, as long as that is below `stop`."""
        build, before = self.build, self.build.block
        test, inside, after = (self.function.append_basic_block(name) for name in ("test", "inside", "after"))
        build.branch(test)
        build.position_at_end(test)
        number = build.phi(I64)
        number.add_incoming(first, before)
        build.cbranch(build.icmp_signed("<", number, stop), inside, after)
        build.position_at_end(inside)
        number.add_incoming(body(number), build.block)
        build.branch(test)
        build.position_at_end(after)


def _value(number: Value | int) -> Value:
    return const(number) if isinstance(number, int) else number
