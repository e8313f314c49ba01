"""Embeddings and fused attention.

An embedding can be differentiated any number of times; fused attention once. Attention that is written out as
products and a softmax can be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lowtide.autodiff.rules.rule import Contribution, Rules, Site, given, made, register
from lowtide.ir.builder import Form, dense
from lowtide.ir.graph import Arg, Ref
from lowtide.ir.strides import in_order

RULES: Rules = {}
_rule = partial(register, RULES)


@_rule("aten.embedding.default", needs={0: [given(1)]})
def _embedding(site: Site) -> Iterator[Contribution]:
    growing, table = site.growing, site.given(0)
    if site.option(4, "sparse", False):
        site.refuse("its gradient is sparse", "Set sparse=False.")
    options = (site.option(2, "padding_idx", -1), site.option(3, "scale_grad_by_freq", False))
    args: list[Arg] = [site.grad, site.given(1), growing.shape(table)[0], *options]
    form = dense(growing.shape(table), growing.dtype(table))
    yield 0, growing.call("aten.embedding_dense_backward.default", args, form)


@_rule("aten.embedding_dense_backward.default", needs={0: [given(1)]})
def _embedding_backward(site: Site) -> Iterator[Contribution]:
    if site.op.args[3] != -1 or site.op.args[4]:
        site.refuse("it leaves out a padding row or scales by frequency", "Do without either.")
    form = dense(site.shape(0), site.growing.dtype(site.grad))
    yield 0, site.growing.call("aten.embedding.default", [site.grad, site.given(1)], form)


_QUERY_KEY_VALUE = (given(0), given(1), given(2), made(0), made(1))


@_rule(
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    needs=dict.fromkeys((0, 1, 2), _QUERY_KEY_VALUE),
)
def _attention(site: Site) -> Iterator[Contribution]:
    """The one kernel makes all three gradients, each with the heads inside of the tokens."""
    growing, three = site.growing, [site.given(position) for position in range(3)]
    forms = [
        Form(growing.shape(each), in_order(growing.shape(each), (0, 2, 1, 3)), growing.dtype(each))
        for each in three
    ]
    dropped, causal = site.option(3, "dropout_p", 0.0), site.option(4, "is_causal", False)
    made_too = site.growing.calls(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        [site.grad, *three, site.made(0), site.made(1), dropped, causal],
        forms,
        {name: arg for name, arg in site.op.kwargs if name in ("attn_mask", "scale")},
    )
    for position, gradient in enumerate(made_too):
        if site.wants(position) and isinstance(gradient, Ref):
            yield position, gradient
