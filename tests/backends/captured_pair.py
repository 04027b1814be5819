"""Recorded answers of the engines' prefill and decode workers."""

import re
from pathlib import Path

from backends.json_body import JsonBody

CAPTURES = Path(__file__).parents[1] / "data" / "captures"


def sglang_request(name: str) -> JsonBody:
    """The body that was sent."""
    sent = (CAPTURES / "sglang" / f"{name}.http").read_bytes().partition(b"### RESPONSE")[0]
    return JsonBody.parse(sent[sent.index(b"{") :].strip())


def sglang_answer(name: str) -> bytes:
    """The body that came, without its chunks' framing."""
    raw = (CAPTURES / "sglang" / f"{name}.http").read_bytes()
    came = raw.partition(b"### RESPONSE (raw bytes as received)\n")[2].partition(b"\n### END")[0]
    return unframed(came)


def vllm_answer(name: str) -> bytes:
    """The body that came, without its chunks' framing."""
    return unframed((CAPTURES / "vllm" / f"{name}.resp").read_bytes())


def vllm_request(name: str) -> JsonBody:
    """The body that was sent."""
    return JsonBody.parse((CAPTURES / "vllm" / f"{name}.req").read_bytes().partition(b"\r\n\r\n")[2])


def unframed(answer: bytes) -> bytes:
    """The body of an HTTP answer."""
    head, _, rest = re.split(rb"(\r?\n\r?\n)", answer, maxsplit=1)
    if b"chunked" not in head.lower():
        return rest
    body = b""
    while (match := re.match(rb"([0-9a-f]+)\r?\n", rest)) is not None:
        size = int(match[1], 16)
        body += rest[match.end() : match.end() + size]
        rest = rest[match.end() + size :].lstrip(b"\r\n")
    return body
