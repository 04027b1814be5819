"""Release names of engines. Pure."""

import re


def parse_version(text: str) -> tuple[int, ...]:
    """Leading numbers of a release name: ``0.5.23.post1`` gives ``(0, 5, 23)``; ``()`` if there are none."""
    match = re.match(r"\d{1,9}(?:\.\d{1,9})*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
