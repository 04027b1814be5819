"""Tests of: Fleet, load and policies."""
