"""Tests of gateway.tokens."""
