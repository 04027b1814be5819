"""Chat templates: rendered as Hugging Face renders them, in a sandbox, within bounds."""

import itertools
import time

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from gateway.tokens.chat import ChatPrompt, NotKnown
from gateway.tokens.content_format import ContentFormat
from gateway.tokens.template import Budget, ChatTemplate, RenderLimit

HELLO = {"role": "user", "content": "Hello"}


def _render(source: str, **variables: object) -> str:
    return _within(source, Budget(time.monotonic() + 60), **variables)


def _within(source: str, budget: Budget, **variables: object) -> str:
    return ChatTemplate(source).render(ChatPrompt([HELLO], variables=variables), {"bos_token": "<s>"}, budget)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("{{ bos_token }}{{ messages[0].content }}", "<s>Hello", id="special token"),
        pytest.param("{{ x | tojson }}", '{"b": "<é\'&>", "a": 1.5}', id="tojson escapes nothing"),
        pytest.param(
            "{{ x | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1.5,\n "b": "<é\'&>"\n}', id="tojson options"
        ),
        pytest.param("  {% if true %}\na\n  {% endif %}\nb", "a\nb", id="blocks are trimmed"),
        pytest.param(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01", id="break"
        ),
        pytest.param(
            "{% for i in [3, 4] %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% endfor %}",
            "12False22True",
            id="loop",
        ),
        pytest.param(
            "{% for i in [1] recursive %}{{ i }}{% if i < 3 %}{{ loop([i + 1]) }}{% endif %}{% endfor %}",
            "123",
            id="recursive",
        ),
        pytest.param("{% for i in [] %}a{% else %}b{% endfor %}", "b", id="else of a loop"),
        pytest.param(
            "{% for i in [1, 2, 3] if i != 2 %}{{ loop.length }}{{ loop.nextitem }}{% endfor %}",
            "232",
            id="filtered loop",
        ),
        pytest.param("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1", id="unpacking"),
        pytest.param(
            "{% set n = 1 %}{% generation %}{% set n = 2 %}{{ n }}{% endgeneration %}{{ n }}", "21", id="generation"
        ),
        pytest.param("{{ 'ab' * 3 }}{{ 2 ** 3 }}{{ [1] * 2 }}", "ababab8[1, 1]", id="multiplied"),
        pytest.param("{{ strftime_now('%Y')[:2] }}", "20", id="strftime_now"),
        pytest.param(
            "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}", "TrueTrueTrue", id="variables"
        ),
    ],
)
def test_rendering(source: str, expected: str) -> None:
    assert _render(source, x={"b": "<é'&>", "a": 1.5}) == expected


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", id="class"),
        pytest.param("{{ messages.__init__.__globals__ }}", id="globals"),
        pytest.param("{{ raise_exception.__globals__['__builtins__'] }}", id="globals of a function"),
        pytest.param("{{ messages.append(1) }}", id="changes a list"),
        pytest.param("{{ messages[0].update({'content': 'x'}) }}", id="changes an object"),
        pytest.param("{{ ('{0.__class__.__mro__}' | attr('format'))(x) }}", id="format string"),
        pytest.param("{{ cycler.__init__.__globals__.os.system('true') }}", id="global of jinja"),
        pytest.param("{{ self.__init__.__globals__ }}", id="the template itself"),
        pytest.param("{{ namespace.__init__['__globals__'] }}", id="by item"),
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises((SecurityError, jinja2.UndefinedError)):
        print(_render(source + "{{ undefined.x }}", x="y"))


def test_a_template_can_complain() -> None:
    with pytest.raises(jinja2.TemplateError, match="no such role"):
        _render("{{ raise_exception('no such role') }}")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(LOOP + END, id="silent loop"),
        pytest.param(LOOP + "{{ a }}" + END, id="loop that writes"),
        pytest.param("{% set x %}" + LOOP + "{{ a }}" + END + "{% endset %}", id="loop into a variable"),
        pytest.param(
            "{% macro f(n) %}{% for i in [1, 2] %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}", id="recursion"
        ),
        pytest.param("{% for i in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", id="recursive loop"),
        pytest.param("{{ 'x' * 999999999999 }}", id="repeated text"),
        pytest.param("{{ 999999999999 * [1] }}", id="repeated list"),
        pytest.param("{{ 9 ** (9 ** 9) }}", id="power"),
        pytest.param("{{ range(10 ** 12) | list }}", id="long range"),
        pytest.param("{{ lipsum(n=99999999) }}", id="filler text"),
    ],
)
def test_what_would_take_for_ever_ends(source: str) -> None:
    ticks = itertools.count()
    budget = Budget(deadline=50_000, clock=lambda: float(next(ticks)))
    with pytest.raises((RenderLimit, RecursionError, OverflowError, jinja2.UndefinedError)):
        _within(source, budget)
    assert next(ticks) <= 50_002


def test_output_is_bounded() -> None:
    with pytest.raises(RenderLimit):
        _within("{% for a in range(11) %}{{ 'x' * 10 }}{% endfor %}", Budget(time.monotonic() + 60, max_chars=100))
    assert len(_within("{% for a in range(10) %}{{ 'x' * 10 }}{% endfor %}", Budget(time.monotonic() + 60, 100))) == 100


def test_messages_stay_as_they_were() -> None:
    prompt = ChatPrompt([{"role": "assistant", "content": [{"type": "text", "text": "a "}]}], continues_last=True)
    template = ChatTemplate("{% for part in messages[0].content %}{{ part.text | trim }}{% endfor %}|")
    budget = Budget(time.monotonic() + 60)
    assert template.render(prompt, {}, budget) == template.render(prompt, {}, budget) == "a"
    with pytest.raises(NotKnown):
        ChatTemplate("content").render(prompt, {}, budget)


WRITE_C = "{% macro w(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
WRITE_CONTENT = "{% macro w(content) %}{% for p in content %}{% endfor %}{% endmacro %}"


@pytest.mark.parametrize(
    ("source", "sglang", "vllm"),
    [
        pytest.param("{% for m in messages %}{{ m.content }}{% endfor %}", "string", "string", id="text"),
        pytest.param(
            "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai", "openai", id="m"
        ),
        pytest.param(
            "{% for turn in messages %}{% for p in turn['content'] %}{% endfor %}{% endfor %}",
            "string",
            "openai",
            id="turn",
        ),
        pytest.param(
            "{% for m in messages[1:] %}{% for p in m.content | list %}{% endfor %}{% endfor %}",
            "openai",
            "openai",
            id="slice and filter",
        ),
        pytest.param(
            "{% set t = messages %}{% for x in t %}{% for p in x.content %}{% endfor %}{% endfor %}",
            "string",
            "openai",
            id="assigned",
        ),
        pytest.param(WRITE_C + "{% for x in messages %}{{ w(x.content) }}{% endfor %}", "string", "openai", id="macro"),
        pytest.param(
            WRITE_C + "{% for x in messages %}{{ w(c=x.content) }}{% endfor %}", "string", "openai", id="macro by name"
        ),
        pytest.param(
            WRITE_CONTENT + "{% for x in messages %}{{ w(x.y) }}{% endfor %}",
            "string",
            "string",
            id="macro of something else",
        ),
        pytest.param("{% set content = 1 %}{% for p in content %}{% endfor %}", "string", "openai", id="content"),
        pytest.param("{{ 'image' }}", "openai", "string", id="image"),
    ],
)
def test_form_of_contents(source: str, sglang: str, vllm: str) -> None:
    template = ChatTemplate(source)
    assert (template.sglang_format, template.vllm_format) == (ContentFormat(sglang), ContentFormat(vllm))
