"""The production loop in virtual time with emulated engines: the test bed of the scheduling benchmarks."""
