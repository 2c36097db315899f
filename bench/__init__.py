"""Benchmarks: workloads, runner, plots."""
