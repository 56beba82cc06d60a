"""The `gated-qwen` command: one file per verb."""
