"""Tests of the benchmarks' pure parts; nothing here depends on time."""
