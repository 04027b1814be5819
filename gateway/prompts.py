"""A request's prompt as routing needs it: token ids, the namespace of its blocks, and their hashes. Pure."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from backends.json_body import JsonBody
from backends.types import EngineFacts, EngineKind
from gateway.envelope import Envelope
from gateway.routes import Dialect, Route
from kv_events.hashing import block_hashes, parse_ids, parse_plain_ids
from kv_events.types import BASE, Namespace
from routers.prefix_approximate import CHUNK_BYTES, text_blocks
from routers.types import BlockGroup

_string = msgspec.json.Decoder(str)
_items = msgspec.json.Decoder(list[msgspec.Raw])
# Prompts that are more than their ids, or none that could be hashed.
_MEDIA = frozenset({"image_data", "video_data", "audio_data", "input_embeds", "prompt_embeds", "mm_hashes"})
# What may name another namespace than the base; besides, the model may be an adapter's.
_NAMING = frozenset({"extra_key", "cache_salt", "lora_path", "model"})
_ENGINES = tuple(EngineKind)
# Where the ids stand if they come as such.
_ID_FIELDS = {Dialect.NATIVE: "input_ids", Dialect.COMPLETIONS: "prompt", Dialect.CHAT: "input_ids"}
# What makes the prompt, in the order in which it does, for hashing it as text.
_TEXT_FIELDS = {
    Dialect.NATIVE: ("text",),
    Dialect.COMPLETIONS: ("prompt",),
    Dialect.CHAT: ("tools", "messages"),
    Dialect.MESSAGES: ("tools", "system", "messages"),
    Dialect.RESPONSES: ("instructions", "tools", "input"),
}
_LIST_OF_LISTS = re.compile(rb"\[\s*\[")


class Prompt(msgspec.Struct):
    """One request's prompt; of a batch, its longest.

    Attributes:
        ids: Token ids by engine kind, four bytes each, little-endian; kinds for which they are not known are absent.
        tokens: Tokens of all prompts of the request.
        body: The request, for its namespace.
        text: What makes the prompt, where its ids are not known.
        is_native: The request is one of SGLang's own route, to whichever worker.
    """

    ids: Mapping[EngineKind, bytes]
    tokens: int
    body: JsonBody
    model: str
    text: bytes = b""
    is_native: bool = False
    _hashes: dict[Namespace, dict[BlockGroup, list[int]]] = msgspec.field(default_factory=dict)

    def hashes(self, group: BlockGroup, namespace: Namespace) -> list[int]:
        """Sequence hashes of its full blocks as the workers of a group see them; empty if they are not known."""
        known = self._hashes.setdefault(namespace, {})
        found = known.get(group)
        if found is None:
            ids = self.ids.get(group.engine)
            if ids is not None:
                found = block_hashes(ids, group.block_size, namespace, is_eagle=group.is_eagle)
            else:
                found = list(text_blocks(_mark(namespace) + self.text).sequence_hashes) if self.text else []
            known[group] = found
        return found


def prompt_in_ids(route: Route, envelope: Envelope, model: str) -> Prompt | None:
    """The prompt of a request that brings token ids; ``None`` if it brings text, or ids that nobody could hash."""
    body = envelope.body
    field_name = _ID_FIELDS.get(route.dialect)
    if field_name is None or any(map(body.text, _MEDIA.intersection(body.fields))):
        return None
    text = body.text(field_name)
    if field_name in body.id_counts:
        ids = parse_plain_ids(text)
    elif not text.startswith(b"[") or b'"' in text:
        return None
    else:
        try:
            if _LIST_OF_LISTS.match(text):
                text = bytes(max(_items.decode(text), key=len))
            ids = parse_ids(text)
        except (ValueError, msgspec.DecodeError):
            return None
    tokens = envelope.prompt_tokens or len(ids) // 4
    is_native = route.dialect is Dialect.NATIVE
    return Prompt(dict.fromkeys(_ENGINES, ids), tokens, body, model, is_native=is_native)


def prompt_of(
    envelope: Envelope, model: str, prompts: Mapping[EngineKind, Sequence[bytes]], text: bytes = b""
) -> Prompt:
    """The prompt of a request whose text was tokenized, or not.

    Args:
        envelope: The request.
        model: Its pool.
        prompts: Ids of its prompts by engine kind.
        text: What stands in for kinds whose ids are not known.
    """
    ids = {engine: max(found, key=len) for engine, found in prompts.items() if found}
    tokens = max((sum(map(len, found)) // 4 for found in prompts.values()), default=0) or len(text) // 4
    return Prompt(ids, tokens, envelope.body, model, text, is_native=envelope.native is not None)


def prompt_text(route: Route, body: JsonBody) -> bytes:
    """What makes a request's prompt, as text; empty where that cannot be said, or is too short to matter."""
    names = _TEXT_FIELDS.get(route.dialect, ())
    text = b"".join(body.text(name) for name in names)
    return text if len(text) >= CHUNK_BYTES else b""


def namespace_of(body: JsonBody, model: str, facts: EngineFacts, *, is_native: bool) -> Namespace | None:
    """Which blocks of an engine's cache a request may use; ``None`` if no announced block can be told to be one.

    Args:
        body: The request.
        model: Its pool: the model's name, or an adapter's.
        facts: The engine.
        is_native: The request is one of SGLang's own route; a vLLM worker gets its names for these two.
    """
    if _NAMING.isdisjoint(body.fields) and model not in facts.adapters:
        return BASE
    is_sglang = facts.engine is EngineKind.SGLANG
    if is_sglang and body.text("extra_key"):
        return None
    try:
        salt = _text_of(body, "cache_salt")
        if salt is None and is_native:
            salt = _text_of(body, "extra_key")
        adapter = _text_of(body, "lora_path") if is_sglang or is_native else None
        requested = _text_of(body, "model")
    except msgspec.DecodeError:
        return None
    if adapter is None:
        adapter = next((name for name in (model, requested) if name in facts.adapters), None)
    if adapter is None and requested is not None and requested.startswith(f"{facts.model_id}:"):
        adapter = requested[len(facts.model_id) + 1 :] or None
    return Namespace(lora_name=adapter, salt=salt) if adapter or salt else BASE


def _mark(namespace: Namespace) -> bytes:
    """What keeps a text apart from the same one in other namespaces."""
    return b"" if namespace == BASE else repr((namespace.lora_name, namespace.salt)).encode()


def _text_of(body: JsonBody, name: str) -> str | None:
    text = body.text(name)
    return _string.decode(text) or None if text else None
