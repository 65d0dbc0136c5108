"""The production loop in virtual time with emulated engines, for tests and the scheduling benchmarks."""
