"""The tables of ``docs/rl.md``, as the code has them."""

from collections.abc import Iterator, Mapping

from backends.vllm.native_fields import Fate, NativeField

FATES = {
    Fate.SENT: "sent as",
    Fate.OF_GATEWAY: "done by the gateway",
    Fate.IGNORED: "ignored",
    Fate.REFUSED: "400",
}


def rows(fields: Mapping[str, NativeField]) -> Iterator[str]:
    """The lines of one table."""
    yield "| SGLang | on vLLM | remarks |"
    yield "| --- | --- | --- |"
    for field in fields.values():
        what = f"{FATES[field.fate]} `{field.target}`" if field.target else FATES[field.fate]
        yield f"| `{field.name}` | {what} | {field.note} |"
