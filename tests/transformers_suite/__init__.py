"""Runs the model tests that transformers ships over the classes of this package, with Qwen3 as the reference."""
