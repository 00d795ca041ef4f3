"""Trainers and engines that take turns on the same GPUs, for the cycle of ``integration.colocated``."""
