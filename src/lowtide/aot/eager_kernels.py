"""Captured graphs, rewritten to call the kernels that eager PyTorch calls.

AOTAutograd makes every op a pure function. For BatchNorm that means another kernel than eager's on CUDA
(PyTorch's own in place of cuDNN's), new tensors for the running statistics, and copies of these back into
the buffers at the end. Here it becomes what it is in eager: one call that normalises and updates the
statistics in place. Its backward does not look at them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from lowtide.compat.kernels import functional_batch_norm, is_cudnn_batch_norm

aten = torch.ops.aten

_STATISTICS = (3, 4)  # their positions among the arguments, and of the new ones among the results
_TRAINING = 5  # position of the flag among the arguments


def use_eager_kernels(joint: fx.GraphModule) -> None:
    """Rewrite the BatchNorms of a joint graph that train, in place."""
    graph = joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        _take_statistics_away(node)
    norms = graph.find_nodes(op="call_function", target=functional_batch_norm.default)
    for runs in [_runs_that_write_back(node) for node in norms]:
        for run in reversed(runs):
            _rewrite(graph, run, runs[0].args[3:5])
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        _count_in_place(graph, node)
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        _tell_drawing_from_dropping(graph, node)
    graph.lint()
    joint.recompile()


def _count_in_place(graph: fx.Graph, write: fx.Node) -> None:
    """`buffer.copy_(buffer + 1)`, which is how steps are counted, becomes `buffer.add_(1)`."""
    buffer, source = write.args
    if not (isinstance(source, fx.Node) and source.target is aten.add.Tensor and len(source.users) == 1):
        return
    if source.args[0] is not buffer or source.kwargs or isinstance(source.args[1], fx.Node):
        return
    write.target = aten.add_.Tensor
    write.args = (buffer, source.args[1])
    graph.erase_node(source)


def _tell_drawing_from_dropping(graph: fx.Graph, node: fx.Node) -> None:
    """Dropout draws a mask, and what it makes of its input with it can be made again from both.

    So its result becomes an op of its own, which may be recomputed; the mask is drawn once. That op is the
    same product that dropout's backward is. `emission` takes the result from the kernel that drew the mask
    where that has just run, which is always so the first time. Not in half precision: there the two are
    rounded differently on the CPU.
    """
    x, rate, training = node.args
    results = _results(node)
    if training is not True or not isinstance(rate, float) or not 0 < rate < 1 or sorted(results) != [0, 1]:
        return
    (dropped,), (mask,) = results[0], results[1]
    if dropped.meta["val"].dtype not in (torch.float32, torch.float64):
        return
    with graph.inserting_after(mask):
        again = graph.call_function(
            aten.native_dropout_backward.default, (x, mask, 1 / (1 - rate)), name="dropout"
        )
    again.meta = dict(dropped.meta)
    dropped.replace_all_uses_with(again)
    graph.erase_node(dropped)
    fake = again.meta["val"]
    with fake.fake_mode:
        drawn = torch.empty_like(fake)
    node.meta["val"] = (drawn, node.meta["val"][1])


def is_drawn_with(node: fx.Node) -> fx.Node | None:
    """The dropout that makes the same result as `node` when it draws the mask; None if it is no such op."""
    if node.target is not aten.native_dropout_backward.default:
        return None
    x, mask, _ = node.args
    if not isinstance(mask, fx.Node) or mask.target is not operator.getitem:
        return None
    drawing = mask.all_input_nodes[0]
    same = drawing.target is aten.native_dropout.default and drawing.args[0] is x
    return drawing if same else None


def without_updates(node: fx.Node) -> tuple[Any, ...]:
    """The arguments with which a BatchNorm that has updated its statistics runs again: without them."""
    return tuple(None if position in _STATISTICS else arg for position, arg in enumerate(node.args))


def _take_statistics_away(backward: fx.Node) -> None:
    """Running statistics, which a BatchNorm's backward ignores in training, need not wait for it."""
    if backward.args[7] is True:
        backward.args = without_updates(backward)


def _runs_that_write_back(first: fx.Node) -> list[fx.Node]:
    """The runs of one BatchNorm from its `first` on.

    A BatchNorm that is called several times hands its new statistics from run to run, and they go nowhere
    else but, after the last, into the buffers. Where that is not so, there are none.
    """
    given = [first.args[position] for position in _STATISTICS]
    buffers = [node for node in given if isinstance(node, fx.Node) and node.op == "placeholder"]
    if len(buffers) != len(given):
        return []
    runs = [first]
    while (following := _run_after(runs[-1])) is not None:
        runs.append(following)
    for buffer, position in zip(buffers, _STATISTICS, strict=True):
        users = _users_of_result(runs[-1], position)
        written = [user.target is aten.copy_.default and user.args[0] is buffer for user in users]
        if written != [True] or set(buffer.users) != {first, *users}:
            return []
    return runs if all(run.args[_TRAINING] is True for run in runs) else []


def _run_after(run: fx.Node) -> fx.Node | None:
    """The one BatchNorm that goes on with the new statistics of `run`."""
    found = [_users_of_result(run, position) for position in _STATISTICS]
    if any(len(users) != 1 for users in found) or found[0] != found[1]:
        return None
    following = found[0][0]
    if following.target is not functional_batch_norm.default:
        return None
    handed_on = [following.args[position] for position in _STATISTICS]
    results = _results(run)
    expected = [results[position] for position in _STATISTICS]
    return following if [[node] for node in handed_on] == expected else None


def _users_of_result(node: fx.Node, position: int) -> list[fx.Node]:
    return [user for result in _results(node).get(position, ()) for user in result.users]


def _rewrite(graph: fx.Graph, node: fx.Node, statistics: tuple[Any, ...]) -> None:
    """Normalise as eager does, and update `statistics` in place. Later runs have been rewritten before."""
    results = _results(node)
    backwards = {user for found in results.values() for result in found for user in result.users}
    backwards = {user for user in backwards if _is_backward(user)}
    x, weight, bias, _, _, _, momentum, epsilon = node.args
    arguments = (x, weight, bias, *statistics, True, momentum, epsilon)
    cudnn = _is_cudnns(node)
    target = aten.cudnn_batch_norm.default if cudnn else aten.native_batch_norm.default
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    # The results that stay keep their fakes: nodes that look at them are known by these storages.
    made = node.meta["val"][:3]
    new.meta = {**node.meta, "val": (*made, _fake_result(target, arguments)[3]) if cudnn else made}
    for position in _STATISTICS:
        for result in results.get(position, ()):
            for user in list(result.users):
                graph.erase_node(user)  # the copy into the buffer
            graph.erase_node(result)
    if cudnn:
        with graph.inserting_after(new):
            reserve = graph.call_function(operator.getitem, (new, 3))
        reserve.meta = {**node.meta, "val": new.meta["val"][3]}
        for backward in backwards:
            _use_cudnns_backward(graph, backward, reserve)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _use_cudnns_backward(graph: fx.Graph, node: fx.Node, reserve: fx.Node) -> None:
    gradient, x, weight, _, _, mean, deviation, _, epsilon, _ = node.args
    arguments = (x, gradient, weight, None, None, mean, deviation, epsilon, reserve)
    with graph.inserting_before(node):
        new = graph.call_function(aten.cudnn_batch_norm_backward.default, arguments)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _results(node: fx.Node) -> dict[int, list[fx.Node]]:
    """The nodes that take a result of `node`, by its position."""
    found: dict[int, list[fx.Node]] = {}
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            found.setdefault(user.args[1], []).append(user)
    return found


def _is_backward(node: fx.Node) -> bool:
    """Whether `node` is a BatchNorm's backward that does not look at running statistics."""
    return node.target is aten.native_batch_norm_backward.default and node.args[7] is True


def _is_cudnns(node: fx.Node) -> bool:
    """Whether eager PyTorch would hand this BatchNorm to cuDNN."""
    x, weight, bias, mean, variance = (_fake(arg) for arg in node.args[:5])
    if x.device.type != "cuda" or weight is None:
        return False
    return is_cudnn_batch_norm(x, weight, bias, mean, variance, epsilon=node.args[7])


def _fake(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _fake_result(target: Any, arguments: tuple[Any, ...]) -> Any:
    fakes = [_fake(arg) for arg in arguments]
    with fakes[0].fake_mode:
        return target(*fakes)
