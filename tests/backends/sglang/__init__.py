"""Tests of: The SGLang backend."""
