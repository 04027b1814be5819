"""KV-cache events of the engines: wire formats, hashing, index. Filled by a later release."""
