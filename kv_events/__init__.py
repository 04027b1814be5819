"""KV-cache events of the engines: wire formats, hashing, and the index of who holds which prefix."""
