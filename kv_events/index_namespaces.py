"""Which namespace a block lies in: small numbers for namespaces, and what a child takes over from its parent. Pure."""

from dataclasses import dataclass

from kv_events.types import BASE, Namespace

# Numbers above the 64 bits of a sequence hash. A key then fits into the same object as the bare hash would.
SHIFT = 64
BASE_ID = 0
# Blocks that no request can name; a query never has this number.
OPAQUE_ID = 1
MAX_NAMESPACES = 1 << 20


def inherit(parent: Namespace, own: Namespace | None) -> Namespace | None:
    """Combine what a child says about itself with the namespace of its parent.

    What the child leaves open comes from its parent, field by field: vLLM repeats the adapter in every block, the salt
    only in the first. A salted child of an unsalted parent opens its own namespace. All else that differs is ambiguous.

    Returns:
        The child's namespace; ``None`` if it is ambiguous, so that the block must never be matched.
    """
    if own is None or own == parent:
        return parent
    if own.opaque is not None or parent.opaque is not None:
        return None
    has_own_lora = own.lora_name is not None or own.lora_id is not None
    is_same_lora = not has_own_lora or (own.lora_name, own.lora_id) == (parent.lora_name, parent.lora_id)
    if parent.salt is not None and (own.salt not in (None, parent.salt) or not is_same_lora):
        return None
    has_parent_lora = parent.lora_name is not None or parent.lora_id is not None
    if has_parent_lora and not is_same_lora:
        return None
    lora = own if has_own_lora else parent
    salt = own.salt if own.salt is not None else parent.salt
    return Namespace(lora_name=lora.lora_name, lora_id=lora.lora_id, salt=salt)


@dataclass(slots=True)
class _Entry:
    namespace: Namespace
    blocks: int = 0


class NamespaceTable:
    """Numbers for the namespaces in use; a number is given back with the last block that lies in it."""

    def __init__(self) -> None:
        """Know the base namespace and the opaque one, which stay."""
        self._ids: dict[Namespace, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._free: list[int] = []
        self._next = OPAQUE_ID + 1

    def __len__(self) -> int:
        """Count the namespaces besides the base and the opaque one."""
        return len(self._entries)

    def find(self, namespace: Namespace) -> int | None:
        """Look up a namespace that a request names; ``None`` if no block lies in it."""
        return BASE_ID if namespace is BASE or namespace == BASE else self._ids.get(namespace)

    def number(self, namespace: Namespace | None) -> int:
        """Give the number of a namespace, a new one if it has none; ``None`` and all opaque ones share one number."""
        if namespace is BASE:
            return BASE_ID
        if namespace is None or namespace.opaque is not None:
            return OPAQUE_ID
        if namespace == BASE:
            return BASE_ID
        known = self._ids.get(namespace)
        if known is not None:
            return known
        if len(self._entries) >= MAX_NAMESPACES:
            return OPAQUE_ID
        if self._free:
            number = self._free.pop()
        else:
            number, self._next = self._next, self._next + 1
        self._ids[namespace] = number
        self._entries[number] = _Entry(namespace)
        return number

    def namespace(self, number: int) -> Namespace | None:
        """Give the namespace of a number; ``None`` for the opaque one."""
        if number == BASE_ID:
            return BASE
        return None if number == OPAQUE_ID else self._entries[number].namespace

    def count(self, number: int, blocks: int) -> None:
        """Note that ``blocks`` more (or, negative, fewer) lie in a namespace; one that is empty is forgotten."""
        if number <= OPAQUE_ID:
            return
        entry = self._entries[number]
        entry.blocks += blocks
        if entry.blocks <= 0:
            del self._entries[number], self._ids[entry.namespace]
            self._free.append(number)
