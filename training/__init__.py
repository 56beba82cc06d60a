"""Recipes, parameter groups, adapters and callbacks for training with the usual tools."""
