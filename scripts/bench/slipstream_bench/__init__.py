"""Shared parts of the benchmarks, studies and attacks in scripts/bench."""
