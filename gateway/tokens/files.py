"""Reads a model's tokenizer from its directory, at start; what is wrong there is told with the option and a remedy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer

from backends.types import EngineKind
from gateway.tokens.template import ChatTemplate

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERT = "load the model once with transformers and give the directory that save_pretrained() wrote"
# Architectures whose conversations an engine renders with code of its own, not with a template.
_OWN_CODE: Mapping[EngineKind, tuple[str, ...]] = {
    EngineKind.SGLANG: ("deepseekv32", "deepseekv4", "kimik3", "inkling"),
    EngineKind.VLLM: ("deepseekv32", "deepseekv4", "kimik3", "inkling", "gptoss", "cohere2"),
}


class TokenizerError(ValueError):
    """A tokenizer cannot be used; the message names the option and says what to do."""


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """One model's tokenizer, as its engines use it. Safe to use from several threads.

    Attributes:
        model: Name under which the model is served.
        tokenizer: Without truncation and padding.
        templates: Chat templates by name; the one that is used without tools is ``default``. Empty for models that
            do not chat.
        special_tokens: Template variables such as ``bos_token``.
        bos_id: Id of the beginning of a sequence, ``None`` without one.
        vocab_size: Ids are below this, and no more log-probabilities than this can be asked for.
        own_code: Engine kinds that do not use the templates.
    """

    model: str
    tokenizer: Tokenizer
    templates: Mapping[str, ChatTemplate]
    special_tokens: Mapping[str, str]
    bos_id: int | None
    vocab_size: int
    own_code: frozenset[EngineKind]

    def template(self, *, has_tools: bool) -> ChatTemplate | None:
        """The template of a conversation; ``None`` without any."""
        if has_tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        return self.templates.get("default")


def load_tokenizer(model: str, directory: Path) -> ModelTokenizer:
    """Read ``directory``.

    Raises:
        TokenizerError: It is missing, or what is in it cannot be used.
    """
    option = f"--tokenizer {model}={directory}"
    try:
        return _load(model, directory)
    except OSError as exc:
        raise TokenizerError(f"{option}: {exc.filename or directory} cannot be read: {exc.strerror}") from exc
    except TokenizerError as exc:
        raise TokenizerError(f"{option}: {exc}") from exc


def _load(model: str, directory: Path) -> ModelTokenizer:
    if not directory.is_dir():
        raise TokenizerError("no such directory; give the one that holds the model's tokenizer.json")
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"there is no tokenizer.json in it; {_CONVERT}")
    settings = _read_object(directory / "tokenizer_config.json")
    architecture = _read_object(directory / "config.json")
    special = _special_tokens(_read_object(directory / "special_tokens_map.json"), settings)
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _complete(tokenizer, settings, special)
    except (OSError, TokenizerError):
        raise
    except Exception as exc:  # the library raises plain exceptions
        raise TokenizerError(
            f"tokenizer.json is not what this release of tokenizers reads ({exc}); {_CONVERT}"
        ) from exc
    bos = special.get("bos_token")
    return ModelTokenizer(
        model=model,
        tokenizer=tokenizer,
        templates=_templates(directory, settings),
        special_tokens=special,
        bos_id=None if bos is None else tokenizer.token_to_id(bos),
        vocab_size=_vocab_size(architecture, tokenizer),
        own_code=_own_code(architecture, directory),
    )


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, an empty one if the file is not there."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        raise TokenizerError(f"{path.name} is not valid JSON ({exc}); copy it from the model again") from exc
    if not isinstance(value, dict):
        raise TokenizerError(f"{path.name} is not a JSON object; copy it from the model again")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Names of special tokens to their texts; later sources win."""
    found: dict[str, str] = {}
    for source in sources:
        extra = source.get("extra_special_tokens")
        for name, value in {**(extra if isinstance(extra, dict) else {}), **_named(source)}.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _named(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: source[name] for name in SPECIAL_TOKENS if name in source}


def _complete(tokenizer: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Do what transformers does beyond tokenizer.json, which alone says what is put around a text."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder")
    added: list[AddedToken] = []
    for _, token in sorted((int(key), value) for key, value in (listed if isinstance(listed, dict) else {}).items()):
        flags = {name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        added.append(AddedToken(token["content"], normalized=bool(token.get("normalized", True)), **flags))
    added = [token for token in added if token.content not in known]
    known |= {token.content for token in added}
    added += [AddedToken(text, special=True) for text in dict.fromkeys(special.values()) if text not in known]
    if added:
        tokenizer.add_tokens(added)
    if settings.get("split_special_tokens") is True:
        tokenizer.encode_special_tokens = True


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    found: dict[str, ChatTemplate] = {}
    for name, (where, source) in _template_sources(directory, settings).items():
        try:
            found[name] = ChatTemplate(source)
        except jinja2.TemplateSyntaxError as exc:
            remedy = "correct it, or take it away: chats are then placed without knowing their ids"
            raise TokenizerError(f"{where}, line {exc.lineno}: {exc.message}; {remedy}") from exc
    return found


def _template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """File name and text of every template, by the template's name."""
    files = [directory / "chat_template.jinja", *sorted((directory / "additional_chat_templates").glob("*.jinja"))]
    found = {
        "default" if path is files[0] else path.stem: (path.name, path.read_text(encoding="utf-8"))
        for path in files
        if path.is_file()
    }
    if found:
        return found
    for name, given in (
        ("tokenizer_config.json", settings.get("chat_template")),
        ("chat_template.json", _read_object(directory / "chat_template.json").get("chat_template")),
    ):
        if isinstance(given, str):
            return {"default": (name, given)}
        if isinstance(given, list):
            return {
                one["name"]: (name, one["template"])
                for one in given
                if isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
            }
    return {}


def _vocab_size(architecture: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """What the model's configuration says; without one, what the tokenizer can make."""
    parts = [architecture, *(architecture.get(name) for name in ("text_config", "llm_config", "thinker_config"))]
    for part in parts:
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _own_code(architecture: Mapping[str, Any], directory: Path) -> frozenset[EngineKind]:
    if (directory / "tekken.json").is_file():
        return frozenset(EngineKind)
    listed = architecture.get("architectures")
    names = [architecture.get("model_type"), *(listed if isinstance(listed, list) else [])]
    flat = " ".join(str(name).lower().replace("_", "") for name in names)
    return frozenset(kind for kind, known in _OWN_CODE.items() if any(name in flat for name in known))
