"""Runs the model tests that transformers ships over the classes of this package, against Qwen3 and Qwen3-MoE."""
