"""Long-context tasks and perplexity for any Hugging Face causal LM, offline and from a seed."""
