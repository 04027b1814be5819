"""Engines: upstream HTTP clients, wire formats and what SGLang and vLLM each need."""
