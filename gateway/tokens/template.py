"""Chat templates: compiled as Hugging Face compiles them, rendered in a sandbox and within bounds.

The templates are the operator's; what they are rendered with is anybody's. A request's own template is never compiled.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from copy import deepcopy
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.tokens.chat import ChatPrompt, NotKnown
from gateway.tokens.content_format import ContentFormat, sglang_format, vllm_format

MAX_RENDERED_CHARS = 1_000_000
# Marks where the last message's text ends. The space shows whether the template strips what it writes.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class RenderLimit(NotKnown):
    """A rendering took too long, or made too much."""


class Budget:
    """What one rendering may use up."""

    __slots__ = ("_chars", "_clock", "_deadline")

    def __init__(
        self, deadline: float, max_chars: int = MAX_RENDERED_CHARS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._deadline = deadline
        self._chars = max_chars
        self._clock = clock

    def step(self) -> None:
        """Take note of one step.

        Raises:
            RenderLimit: The deadline is over.
        """
        if self._clock() > self._deadline:
            raise RenderLimit("rendering takes too long")

    def write(self, chars: int) -> None:
        """Take note of ``chars`` of output.

        Raises:
            RenderLimit: The deadline is over, or that is too much.
        """
        self.step()
        self._chars -= chars
        if self._chars < 0:
            raise RenderLimit("the rendered text is too long")


_budget: ContextVar[Budget] = ContextVar("budget")


def _stepwise(items: Iterable[Any]) -> Iterator[Any]:
    """``items`` of a loop, each of which counts as a step."""
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which calls are steps, and a text or list is not multiplied beyond what may be written."""

    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise RenderLimit("a power is too high")
        for one, other in ((left, right), (right, left)):
            if hasattr(one, "__len__") and isinstance(other, int) and len(one) * other > MAX_RENDERED_CHARS:
                raise RenderLimit("a repeated value is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant wrote; only training reads it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Take the body as it is, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["_stepwise"] = _stepwise
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


class ChatTemplate:
    """One compiled template. Safe to use from several threads.

    Attributes:
        source: The template's text.
        sglang_format: Form of contents that SGLang finds it to want.
        vllm_format: The same for vLLM.
    """

    def __init__(self, source: str) -> None:
        """Compile ``source``.

        Raises:
            jinja2.TemplateSyntaxError: It cannot be compiled.
        """
        environment = _environment()
        tree = environment.parse(source)
        self.source = source
        self.sglang_format: ContentFormat = sglang_format(source, tree)
        self.vllm_format: ContentFormat = vllm_format(tree)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_stepwise", [], [], None, None).set_lineno(loop.lineno)
        tree.set_environment(environment)
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, prompt: ChatPrompt, special_tokens: Mapping[str, str], budget: Budget) -> str:
        """The text of a conversation.

        Raises:
            NotKnown: It has no such text, or rendering passes the budget.
            Exception: Whatever a template can raise.
        """
        messages = deepcopy(prompt.messages)
        if prompt.continues_last:
            _mark_end(messages[-1])
        text = self._render(
            {
                **special_tokens,
                "documents": None,
                **prompt.variables,
                "messages": messages,
                "tools": prompt.tools,
                "add_generation_prompt": prompt.add_generation_prompt,
            },
            budget,
        )
        return _cut_at_mark(text) if prompt.continues_last else text

    def _render(self, variables: Mapping[str, Any], budget: Budget) -> str:
        token = _budget.set(budget)
        try:
            pieces: list[str] = []
            for piece in self._template.generate(variables):
                budget.write(len(piece))
                pieces.append(piece)
            return "".join(pieces)
        finally:
            _budget.reset(token)


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _END_MARK
        return
    for part in reversed(content or []):
        if isinstance(part, dict) and "text" in part:
            part["text"] += _END_MARK
            return
    raise NotKnown("nothing to continue")


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END_MARK.strip())
    if end < 0:
        raise NotKnown("the template drops the message to continue")
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
