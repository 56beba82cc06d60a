"""Checkpoint layouts and the converter."""
