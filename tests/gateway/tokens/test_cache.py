"""Remembered ids stay within their bound, and the oldest go first."""

from gateway.tokens.cache import ENTRY_BYTES, IdCache, cache_key


def _key(number: int) -> bytes:
    return cache_key("m", str(number), add_special_tokens=True)


def test_the_least_recently_used_goes() -> None:
    cache = IdCache(max_bytes=10 * (ENTRY_BYTES + 4))
    for number in range(10):
        cache.put(_key(number), b"\0\0\0\0")
    assert cache.get(_key(0)) is not None
    cache.put(_key(10), b"\0\0\0\0")
    assert [number for number in range(11) if cache.get(_key(number)) is None] == [1]
    assert cache.used_bytes == 10 * (ENTRY_BYTES + 4)


def test_putting_twice_counts_once() -> None:
    cache = IdCache(max_bytes=10_000)
    cache.put(_key(1), b"\0" * 40)
    cache.put(_key(1), b"\0" * 40)
    assert cache.used_bytes == ENTRY_BYTES + 40


def test_one_long_prompt_does_not_empty_it() -> None:
    cache = IdCache(max_bytes=80_000)
    cache.put(_key(1), b"\0" * 20_000)
    assert (cache.get(_key(1)), cache.used_bytes) == (None, 0)
    nothing = IdCache(max_bytes=0)
    nothing.put(_key(1), b"")
    assert nothing.get(_key(1)) is None


def test_keys_tell_apart_what_is_encoded_differently() -> None:
    keys = {
        cache_key(model, text, add_special_tokens=add)
        for model in ("a", "b")
        for text in ("", "x", "0\0x")
        for add in (True, False)
    }
    assert len(keys) == 12
