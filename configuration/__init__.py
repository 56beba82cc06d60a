"""Config class, presets of the paper's shapes, parameter and cost accounting."""
