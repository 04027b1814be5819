"""Thousands of mixed requests against real processes that fail, while clients leave; nothing may be lost or left."""
