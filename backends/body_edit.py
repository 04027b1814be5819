"""Bodies of single legs, made from the client's: fields set, replaced, left out; all else its own bytes. Pure."""

import json
from collections.abc import Collection, Mapping

import msgspec

from backends.json_body import JsonBody


def edited(body: JsonBody, changes: Mapping[str, bytes], removed: Collection[str] = ()) -> JsonBody:
    """A body with ``changes`` applied and ``removed`` left out, which win over changes to nothing.

    Args:
        body: Not changed.
        changes: JSON text by field name; new fields go to the end.
        removed: Names of fields; those that are not there are ignored. None of them may be in ``changes``.
    """
    kept = {name: value for name, value in body.fields.items() if name not in removed}
    fields = {**kept, **{name: msgspec.Raw(value) for name, value in changes.items()}}
    if len(kept) == len(body.fields):
        raw = b"".join(body.with_fields(changes))
    else:
        members = (
            b"%b:%b" % (json.dumps(name, ensure_ascii=False).encode(), bytes(value)) for name, value in fields.items()
        )
        raw = b"{%b}" % b",".join(members)
    made = JsonBody(raw, fields)
    made.id_counts = {name: count for name, count in body.id_counts.items() if name in kept and name not in changes}
    return made
