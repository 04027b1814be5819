"""Reading a model's directory: what is taken from where, and what is said of a directory that cannot be used."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from backends.types import EngineKind
from gateway.tokens.files import TokenizerError, load_tokenizer
from tests.gateway.tokens.tiny import TOKENIZERS

HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a model's directory, to be changed."""
    return Path(shutil.copytree(TOKENIZERS / "vllm-tiny", tmp_path / "model"))


def _change(path: Path, **changes: object) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**known, **changes}.items() if value is not ...}))


def _ids(directory: Path, text: str) -> list[int]:
    tokenizer = load_tokenizer("m", directory).tokenizer
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids
    return ids


def test_what_is_read(directory: Path) -> None:
    found = load_tokenizer("m", directory)
    assert found.model == "m"
    assert found.vocab_size == json.loads((directory / "config.json").read_text())["vocab_size"]
    assert found.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    assert found.bos_id == 0
    assert found.own_code == frozenset()
    template = found.template(has_tools=True)
    assert template is not None
    assert template is found.template(has_tools=False)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        pytest.param(shutil.rmtree, "no such directory; give the one", id="no directory"),
        pytest.param(lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json in it; .* save_pre", id="no file"),
        pytest.param(lambda d: (d / "tokenizer.json").write_text("{}"), "is not .*save_pre", id="other JSON"),
        pytest.param(lambda d: (d / "tokenizer.json").write_bytes(b"\xff"), "tokenizer.json is not", id="not UTF-8"),
        pytest.param(lambda d: (d / "tokenizer_config.json").write_text("{"), "is not valid JSON .*copy", id="broken"),
        pytest.param(lambda d: (d / "config.json").write_text("[]"), "is not a JSON object; copy", id="list"),
        pytest.param(
            lambda d: (d / "chat_template.jinja").write_text("a\n{% if %}"),
            "chat_template.jinja, line 2: .*; correct it, or take it away",
            id="broken template",
        ),
        pytest.param(
            lambda d: _change(d / "tokenizer_config.json", added_tokens_decoder={"x": 1}), "is not", id="odd tokens"
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_the_option(directory: Path, break_it: object, message: str) -> None:
    assert callable(break_it)
    break_it(directory)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer("org/m", directory)
    assert str(caught.value).startswith(f"--tokenizer org/m={directory}: ")


@pytest.mark.parametrize(
    ("written", "has_tools", "expected"),
    [
        pytest.param({"chat_template": "one"}, True, "one", id="one"),
        pytest.param({"chat_template": [{"name": "default", "template": "a"}]}, True, "a", id="list of one"),
        pytest.param(
            {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
            True, "b", id="for tools",
        ),
        pytest.param(
            {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
            False, "a", id="without tools",
        ),
        pytest.param({"chat_template": [{"name": "rag", "template": "a"}, 1]}, False, None, id="no default"),
        pytest.param({}, False, None, id="none"),
    ],
)  # fmt: skip
def test_templates_of_the_settings(
    directory: Path, written: dict[str, object], has_tools: bool, expected: str | None
) -> None:
    (directory / "chat_template.jinja").unlink()
    _change(directory / "tokenizer_config.json", **written)
    template = load_tokenizer("m", directory).template(has_tools=has_tools)
    assert (template and template.source) == expected


def test_template_files_come_first(directory: Path) -> None:
    _change(directory / "tokenizer_config.json", chat_template="settings")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    found = load_tokenizer("m", directory)
    assert {name: template.source[:14] for name, template in found.templates.items()} == {
        "default": "{% for m in me",
        "tool_use": "file for tools",
    }
    (directory / "chat_template.jinja").unlink()
    shutil.rmtree(directory / "additional_chat_templates")
    _change(directory / "tokenizer_config.json", chat_template=...)
    (directory / "chat_template.json").write_text('{"chat_template": "processor"}')
    template = load_tokenizer("m", directory).template(has_tools=False)
    assert template is not None
    assert template.source == "processor"


def test_what_is_put_around_a_text_is_in_tokenizer_json(directory: Path) -> None:
    _change(directory / "tokenizer_config.json", add_bos_token=True, add_eos_token=True)
    assert _ids(directory, "Hello, world!") == [784, 15, 812, 4]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", pair=None, special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _change(directory / "tokenizer_config.json", add_bos_token=False)
    assert _ids(directory, "Hello, world!") == [0, 784, 15, 812, 4]


def test_added_tokens_of_the_settings(directory: Path) -> None:
    before = _ids(directory, "a<extra>b<image>")
    flags = {"content": "<extra>", "lstrip": False, "rstrip": False, "single_word": False, "special": True}
    _change(
        directory / "tokenizer_config.json",
        added_tokens_decoder={"1024": {**flags, "normalized": False}, "1": {**flags, "content": "<|im_start|>"}},
        extra_special_tokens={"image_token": "<image>"},
    )
    after = _ids(directory, "a<extra>b<image>")
    assert len(after) == 4 < len(before)
    assert after[1::2] == [1024, 1025]
    assert load_tokenizer("m", directory).special_tokens["image_token"] == "<image>"


def test_truncation_and_padding_of_the_file_are_off(directory: Path) -> None:
    plain = _ids(directory, "Hello, world!")
    _change(
        directory / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 3,
                 "pad_type_id": 0, "pad_token": "<|pad|>"},
    )  # fmt: skip
    assert _ids(directory, "Hello, world!") == plain


@pytest.mark.parametrize(
    ("config", "size"),
    [
        pytest.param({"vocab_size": 2000}, 2000, id="model"),
        pytest.param({"vocab_size": ..., "text_config": {"vocab_size": 3000}}, 3000, id="text part of a model"),
        pytest.param({"vocab_size": ...}, 1024, id="tokenizer"),
        pytest.param({"vocab_size": True}, 1024, id="no number"),
    ],
)
def test_vocabulary(directory: Path, config: dict[str, object], size: int) -> None:
    _change(directory / "config.json", **config)
    assert load_tokenizer("m", directory).vocab_size == size


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"model_type": "gpt_oss"}, {EngineKind.VLLM}, id="gpt_oss"),
        pytest.param({"architectures": ["DeepseekV41ForCausalLM"]}, set(EngineKind), id="deepseek v4"),
        pytest.param({"architectures": None, "model_type": None}, set(), id="unknown"),
    ],
)
def test_engines_with_code_of_their_own(directory: Path, config: dict[str, object], expected: set[EngineKind]) -> None:
    _change(directory / "config.json", **config)
    assert load_tokenizer("m", directory).own_code == expected
    (directory / "tekken.json").write_text("{}")
    assert load_tokenizer("m", directory).own_code == set(EngineKind)
