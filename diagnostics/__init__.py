"""Probes of what attention and its gates do, their statistics and their report."""
