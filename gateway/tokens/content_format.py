"""Whether a chat template wants a message's content as one string or as a list of parts. Pure.

Both engines decide that by looking for a loop over the content, in different ways.
"""

import enum
from collections.abc import Callable, Iterator

from jinja2 import nodes

_MEDIA = ("image", "audio", "video", "vision")


class ContentFormat(enum.Enum):
    """Form of a message's content."""

    STRING = "string"
    OPENAI = "openai"


def sglang_format(source: str, tree: nodes.Template) -> ContentFormat:
    """What SGLang takes the template to want."""
    if any(word in source for word in _MEDIA):
        return ContentFormat.OPENAI
    found = any(
        _reads(loop.iter, name, "content") for loop in tree.find_all(nodes.For) for name in ("message", "msg", "m")
    )
    return ContentFormat.OPENAI if found else ContentFormat.STRING


def vllm_format(tree: nodes.Template) -> ContentFormat:
    """What vLLM takes the template to want."""
    names = set(_message_names(tree))
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, names)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return ContentFormat.OPENAI
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in names):
            return ContentFormat.OPENAI
        if id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content":
            return ContentFormat.OPENAI
    return ContentFormat.STRING


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether ``node`` is ``name`` or ``name[key]``, perhaps filtered, tested or sliced."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test):
            if node.node is None:
                return False
            node = node.node
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node = node.node
        else:
            break
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _is_name(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_name(node.node, name)


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Variables of loops over the messages, or over a variable that was assigned from them."""
    sources = ["messages"]
    for source in sources:  # grows while it is gone through
        for assignment in tree.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and _reads(assignment.node, source) and target.name not in sources:
                sources.append(target.name)
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, source) for source in sources):
            yield loop.target.name


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, names: set[str]) -> set[str]:
    """Parameters of ``macro`` that get a message's content in some call."""
    parameters = [argument.name for argument in macro.args]
    reads_content: Callable[[nodes.Node], bool] = lambda node: any(_reads(node, name, "content") for name in names)  # noqa: E731
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        found |= {name for name, value in zip(parameters, call.args, strict=False) if reads_content(value)}
        found |= {word.key for word in call.kwargs if word.key in parameters and reads_content(word.value)}
    return found
