"""Stand-ins for the modules that transformers' tests import but its source distribution does not carry.

The mixins only make the imports work: their tests are lost, see skips.py. The multi-process helpers do the work.
"""

import sys
from types import ModuleType
from typing import Any

import torch

from .distributed import run_distributed, start_rank_processes


class ExportTesterMixin:
    """Instead of the tests of `torch.export`."""


class GenerationTesterMixin:
    """Instead of the library's tests of `generate`."""


# Dotted name below the package of the tests -> what the tests import from it.
STAND_INS: dict[str, dict[str, Any]] = {
    "exporters.test_export": {"ExportTesterMixin": ExportTesterMixin},
    "generation.test_utils": {"GenerationTesterMixin": GenerationTesterMixin},
    # Arguments every configuration takes; a handful of our own choice instead of the library's list.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "chunk_size_feed_forward": 5,
            "dtype": "float16",
            "output_hidden_states": True,
            "problem_type": "regression",
            "return_dict": False,
        }
    },
    "distributed_testing_utils": {
        "run_distributed": run_distributed,
        "_start_rank_processes": start_rank_processes,
        "_get_distributed_backend": lambda: "gloo",
        "_get_distributed_device_type": lambda: "cpu",
        "_get_rank_device": lambda rank: torch.device("cpu"),
        "_set_rank_device": lambda rank: None,
    },
}


def install(package: str) -> None:
    """Put the stand-ins where the relative imports inside `package` look for them."""
    for name, contents in STAND_INS.items():
        parts = f"{package}.{name}".split(".")
        for depth in range(2, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
            if depth < len(parts):
                module.__path__ = []  # a package, with no files of its own
        vars(module).update(contents)
