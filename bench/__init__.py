"""Benchmarks of flash_cuda beside its peers; start with `python -m bench.forward --help`."""
