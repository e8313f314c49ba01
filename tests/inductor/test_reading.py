"""What generated code holds, read off the code: written by hand with bytes one can add up, and generated."""

from __future__ import annotations

from textwrap import indent
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.compat.inductor import generated, missing_compiler
from lowtide.compat.tensors import storage_key
from lowtide.cost.measure import growth, record_cpu
from lowtide.inductor.reading import UnreadableCode, read

NO_COMPILER = missing_compiler("cpu")


def code(body: str) -> str:
    """Generated code with this body, as Inductor wraps it."""
    return f"class Runner:\n    def call(self, args):\n{indent(body, ' ' * 8)}\n"


def held(body: str, *args: Tensor, device: str = "cpu", **options: Any) -> int:
    return read(code(body), list(args), device, **options).growth_bytes


def floats(*shape: int) -> Tensor:
    return torch.empty(shape)


# By hand ----------------------------------------------------------------------------------------------


def test_memory_is_held_from_where_it_is_taken_to_where_its_name_is_dropped() -> None:
    """40 and 80 at once; then 80 and 20."""
    body = """
a, = args
args.clear()
assert_size_stride(a, (10, ), (1, ))
buf0 = empty_strided_cpu((10, ), (1, ), torch.float32)
cpp_fused_exp_0(a, buf0)
buf1 = empty_strided_cpu((20, ), (1, ), torch.float32)
cpp_fused_cat_1(buf0, buf1)
del buf0
buf2 = empty_strided_cpu((5, ), (1, ), torch.float32)
cpp_fused_sum_2(buf1, buf2)
return (buf1, buf2, )
"""
    assert held(body, floats(10)) == 40 + 80


def test_memory_that_goes_by_another_name_or_look_is_held_once() -> None:
    body = """
a, = args
args.clear()
buf0 = empty_strided_cpu((10, 2), (2, 1), torch.float32)
buf1 = buf0; del buf0  # reuse
cpp_fused_0(a, buf1)
buf2 = reinterpret_tensor(buf1, (20, ), (1, ), 0); del buf1  # reuse
buf3 = empty_strided_cpu((3, ), (1, ), torch.float64)
return (buf2, reinterpret_tensor(buf3, (1, ), (1, ), 2), )
"""
    assert held(body, floats(10)) == 80 + 24


def test_what_is_given_is_gone_once_it_is_dropped_only_if_nobody_else_has_it() -> None:
    """Without a, 40 bytes fewer; the result takes 60, and there are 20 more than at first."""
    body = """
a, b = args
args.clear()
cpp_fused_0(a, b)
del a
buf0 = empty_strided_cpu((15, ), (1, ), torch.float32)
return (buf0, )
"""
    given = floats(10), floats(10)
    assert held(body, *given) == 60
    assert held(body, *given, owned=(0,)) == 20
    assert held(body, *given, owned=(1,)) == 60  # b is not dropped before the end


def test_a_result_in_memory_that_was_given_takes_none() -> None:
    body = """
a, = args
args.clear()
buf0 = a; del a  # reuse
cpp_fused_0(buf0)
return (buf0, )
"""
    assert held(body, floats(10)) == 0
    assert held(body, floats(10), owned=(0,)) == 0


def test_library_kernels_write_where_they_are_told_and_take_their_workspaces_in_turn() -> None:
    """The product of 80 bytes with 1000 of workspace; then one of 24 beside it with 7."""
    body = """
a, b = args
args.clear()
buf0 = empty_strided_cpu((4, 5), (5, 1), torch.float32)
extern_kernels.mm(a, b, out=buf0)
buf1 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
extern_kernels.mm(b, a, out=buf1)
return (buf0, buf1, )
"""
    given = floats(4, 3), floats(3, 5)
    assert held(body, *given) == 80 + 24
    assert held(body, *given, workspaces={"mm": [1000, 7]}) == 80 + 1000
    assert held(body, *given, workspaces={"mm": [7, 1000]}) == 80 + 24 + 1000
    assert held(body, *given, workspaces={"mm": [1000], "addmm": [5000]}) == 80 + 1000


def test_library_kernels_that_make_their_results_take_what_these_are() -> None:
    """8 channels of 6 × 6 of 2 examples: 2304 bytes; a second time as an op with a workspace of 10."""
    body = """
x, w = args
args.clear()
buf0 = extern_kernels.convolution(x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), transposed=False,
    output_padding=(0, 0), groups=1, bias=None)
buf1 = torch.ops.aten.convolution.default(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
return (buf0, buf1, )
"""
    given = floats(2, 3, 6, 6), floats(8, 3, 3, 3)
    assert held(body, *given) == 2 * 2304
    assert held(body, *given, workspaces={"convolution": [0, 10]}) == 2 * 2304 + 10


def test_of_several_results_each_is_dropped_by_itself() -> None:
    """The gradients of 432 and 864 bytes, of a convolution without a bias; then 700 beside the second."""
    body = """
g, x, w = args
args.clear()
buf0 = torch.ops.aten.convolution_backward.default(g, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
    [True, True, False])
buf1 = buf0[0]
buf2 = buf0[1]
del buf0
del buf1
buf3 = empty_strided_cpu((175, ), (1, ), torch.float32)
return (buf2, buf3, )
"""
    given = floats(1, 8, 6, 6), floats(1, 3, 6, 6), floats(8, 3, 3, 3)
    assert held(body, *given) == 864 + 700
    assert held(body.replace("del buf1\n", ""), *given) == 432 + 864 + 700


def test_triton_kernels_take_nothing_and_the_devices_allocator_rounds() -> None:
    """Two of 512 for 40 and 80 bytes; what is on the CPU is not of the device."""
    body = """
a, = args
args.clear()
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    buf0 = empty_strided_cuda((10, ), (1, ), torch.float32)
    stream0 = get_raw_stream(0)
    triton_poi_fused_0.run(a, buf0, 10, stream=stream0)
    buf1 = empty_strided_cuda((20, ), (1, ), torch.float32)
    buf2 = empty_strided_cpu((1000, ), (1, ), torch.float32)
return (buf0, buf1, )
"""
    assert held(body, floats(10), device="cuda:0") == 512 + 512


def test_what_is_returned_of_what_was_given_is_told_by_its_memory() -> None:
    body = """
a, b = args
args.clear()
buf0 = empty_strided_cpu((15, ), (1, ), torch.float32)
return (reinterpret_tensor(a, (5, 2), (1, 5), 0), buf0, None, )
"""
    found = read(code(body), [floats(10), floats(10)], "cpu")
    look, made, nothing = found.made
    assert nothing is None
    assert (look.shape, look.stride(), made.shape) == ((5, 2), (1, 5), (15,))
    keys = [storage_key(each) for each in found.given]
    assert storage_key(look) == keys[0] != keys[1]
    assert storage_key(made) not in keys
    owned = read(code(body), [floats(10), floats(10)], "cpu", owned=(0,))
    assert len(owned.given) == 1


# As it is generated -----------------------------------------------------------------------------------


def layers(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Two products, what is fused between them, and sums."""
    h = torch.tanh(x @ v) + 1
    y = (h @ w).softmax(-1)
    return y.sum(), h, y.exp().mean(0)


@pytest.mark.skipif(NO_COMPILER is not None, reason=f"{NO_COMPILER} is not here")
def test_generated_code_holds_what_was_read_off_it_to_the_byte() -> None:
    args = [torch.randn(64, 32), torch.randn(32, 48), torch.randn(48, 80)]
    with torch.no_grad():
        run = generated(make_fx(layers)(*args), args, is_backward=False, handed_out=3)
        for found, expected in zip(run(list(args)), layers(*args), strict=True):
            torch.testing.assert_close(found, expected)
        blocks, _ = record_cpu(lambda: run(list(args)))
    found = read(run.source_code, args, "cpu").growth_bytes
    assert found == max(growth(blocks))
    assert found >= 64 * 48 * 4 + 64 * 80 * 4


@pytest.mark.skipif(NO_COMPILER is not None, reason=f"{NO_COMPILER} is not here")
def test_what_generated_code_makes_is_known_before_it_runs() -> None:
    args = [torch.randn(64, 32), torch.randn(32, 48), torch.randn(48, 80)]
    with torch.no_grad():
        run = generated(make_fx(layers)(*args), args, is_backward=False, handed_out=3)
        told = read(run.source_code, args, "cpu").made
        for fake, real in zip(told, run(list(args)), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "def other(args):\n    return args\n", "def call(args):\n    return args\n", code("pass") * 2],
)
def test_code_without_a_function_that_runs_kernels_is_refused(text: str) -> None:
    with pytest.raises(UnreadableCode, match="has no function of its own that runs the kernels"):
        read(text, [], "cpu")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("a, b = args\nreturn ()", "not enough values to unpack"),
        ("return (no_kernel() + 1, )", "unsupported operand"),
        ("buf0 = empty_strided_cpu((2, ), (1, ), torch.nothing)", "has no attribute 'nothing'"),
        ("return torch.ops.aten.nothing.default(1)", "has no attribute 'nothing'"),
        ("return args[7]", "list index out of range"),
    ],
)
def test_code_that_cannot_be_followed_is_refused_with_the_reason(body: str, reason: str) -> None:
    with pytest.raises(UnreadableCode, match="the code that was generated cannot be followed: .*" + reason):
        held(body, floats(3))
