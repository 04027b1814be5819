"""Recorded messages of real engines, as the tests of this package read them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CAPTURES = Path(__file__).resolve().parents[1] / "data" / "captures"
SGLANG_STREAMS = ("kv_events", "kv_events_dp2_rank0", "kv_events_dp2_rank1")
VLLM_STREAMS = ("frames-int-hash", "frames-dp2-lora-bytes-hash")


def load(name: str) -> Any:
    """Read one JSON file."""
    return json.loads((CAPTURES / name).read_text())


def unhex(frames: list[str]) -> list[bytes]:
    """Give the frames of one message."""
    return [bytes.fromhex(frame) for frame in frames]


def sglang_stream(name: str) -> Iterator[tuple[list[bytes], Any]]:
    """Give the messages of one rank with what SGLang's own classes read in them."""
    for line in (CAPTURES / "sglang" / f"{name}.jsonl").read_text().splitlines():
        record = json.loads(line)
        yield unhex(record["frames_hex"]), record["decoded"]


def vllm_messages(name: str, step: str) -> list[list[bytes]]:
    """Give the messages that one step of a vLLM session caused."""
    return [unhex(batch["frames_hex"]) for batch in load(f"vllm/kv-events/{name}.json")[step]["batches"]]


def vllm_prompt(request: str) -> list[int]:
    """Give the token ids that a recorded vLLM request sent."""
    body = (CAPTURES / "vllm" / f"{request}.req").read_bytes().split(b"\r\n\r\n", 1)[1]
    prompt: list[int] = json.loads(body)["prompt"]
    return prompt


def payloads() -> Iterator[bytes]:
    """Give the payloads of all messages, of every engine and release."""
    for releases in load("sglang/kv_encoding_by_version.json").values():
        for shape in releases.values():
            yield bytes.fromhex(shape["payload_hex"])
    for name in SGLANG_STREAMS:
        for frames, _ in sglang_stream(name):
            yield frames[-1]
    for name in VLLM_STREAMS:
        for step in load(f"vllm/kv-events/{name}.json"):
            for frames in vllm_messages(name, step):
                yield frames[-1]
