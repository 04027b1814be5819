"""Tests of: The vLLM backend."""
