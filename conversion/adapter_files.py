"""Adapter folders as PEFT writes them: reading one into the updates of its modules, and writing one."""

import hashlib
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_qwen.conversion.checkpoint import PICKLES, SIDE_FILES, CheckpointError, read_json
from gated_qwen.conversion.folder import atomic_folder
from gated_qwen.conversion.writer import PROVENANCE_NAME, write_json

if TYPE_CHECKING:
    import torch

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
LINEAR_PARTS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
EMBEDDING_PARTS = (".lora_embedding_A", ".lora_embedding_B", ".lora_magnitude_vector")
# Kinds of LoRA whose update of a weight is not (alpha / rank) B A, by the field that asks for them.
OTHER_KINDS = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
# Initialisations that leave the base's weights as they are; the others move a part of them into the adapter.
KEEP_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Update:
    """The update of one weight W (out, in): W + scaling * B A; with DoRA the rows get the norms of `magnitude`.

    For an embedding, whose weight is (in, out), PEFT adds the transpose and has other names.
    """

    a: "torch.Tensor"  # (rank, in)
    b: "torch.Tensor"  # (out, rank)
    scaling: float
    magnitude: "torch.Tensor | None" = None  # (out,)
    of_embedding: bool = False

    def with_rows(self, function: "Callable[[torch.Tensor], torch.Tensor]") -> "Update":
        """The update of `function(W)`, where it moves, repeats or selects rows."""
        magnitude = None if self.magnitude is None else function(self.magnitude)
        return replace(self, b=function(self.b), magnitude=magnitude)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its config as it stands in the file, the updates by module, and every other tensor by name."""

    config: dict[str, Any]
    updates: Mapping[str, Update]
    others: "Mapping[str, torch.Tensor]"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json, once the folder is known to be safe to load.

    Raises:
        CheckpointError: no such folder or file, pickled weights only, or a config that makes PEFT import a module.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_json(folder / CONFIG_NAME, "an adapter folder needs it; is this a model folder?")
    if not (folder / WEIGHTS_NAME).is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise CheckpointError(f"{folder / pickles[0]}: pickled weights are not read; save the adapter again")
        raise CheckpointError(f"{folder}: {CONFIG_NAME} without {WEIGHTS_NAME}")
    if not isinstance(config.get("peft_type"), str):
        raise CheckpointError(f"{folder / CONFIG_NAME}: peft_type is missing")
    if config.get("megatron_config"):
        raise CheckpointError(f"{folder / CONFIG_NAME}: megatron_config: adapters for Megatron are not read")
    return config


def read_adapter_tensors(folder: Path) -> dict[str, "torch.Tensor"]:
    """Every tensor of an adapter, by its name without PEFT's prefix.

    Raises:
        CheckpointError: the file is broken, or a name is not one of PEFT's.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: truncated or not a safetensors file ({error}); save the adapter again"
        ) from error
    if wrong := sorted(name for name in tensors if not name.startswith(PREFIX)):
        raise CheckpointError(
            f"{path}: tensor {wrong[0]} does not begin with {PREFIX}, so it is not of a PEFT adapter"
        )
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def read_adapter(folder: Path) -> Adapter:
    """Reads a LoRA, rsLoRA or DoRA adapter.

    Raises:
        CheckpointError: broken, or another kind of adapter, which is named.
    """
    config = read_adapter_config(folder)
    if config["peft_type"] != "LORA":
        raise CheckpointError(f"{folder / CONFIG_NAME}: peft_type {config['peft_type']!r}; only LORA is converted")
    for name in OTHER_KINDS:
        if config.get(name):
            raise CheckpointError(
                f"{folder / CONFIG_NAME}: {name}={config[name]!r}: this kind of LoRA is not converted"
            )
    if config.get("init_lora_weights") not in KEEP_THE_BASE:
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: init_lora_weights={config['init_lora_weights']!r} changes the base's weights; "
            "save the adapter with PEFT's path_initial_model_for_weight_conversion first"
        )
    tensors = read_adapter_tensors(folder)
    updates = {}
    for parts, of_embedding in ((LINEAR_PARTS, False), (EMBEDDING_PARTS, True)):
        # Experts are parameters of three dimensions, adapted by target_parameters: kept as they are.
        ends = [name for name in tensors if name.endswith(parts[0]) and ".experts." not in name]
        for module in sorted(name.removesuffix(parts[0]) for name in ends):
            a, b, magnitude = (tensors.pop(module + part, None) for part in parts)
            if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
                raise CheckpointError(f"{folder / WEIGHTS_NAME}: module {module}: its A and B do not fit each other")
            updates[module] = Update(a, b, _scaling(config, module, a.shape[0]), magnitude, of_embedding)
    return Adapter(config, updates, tensors)


def _scaling(config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA, with the alpha that PEFT finds for the module."""
    patterns = config.get("alpha_pattern") or {}
    try:
        key = next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), None)
        alpha = float(config.get("lora_alpha", 8) if key is None else patterns[key])
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (re.error, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{CONFIG_NAME}: lora_alpha and alpha_pattern give module {module} no scaling ({error})"
        ) from error


def adapter_record(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What a provenance record says of an adapter; a record of its own, where it has one, goes along."""
    kept = ("target_modules", "target_parameters", "r", "lora_alpha", "rank_pattern", "alpha_pattern")
    record: dict[str, Any] = {
        "name": folder.resolve().name,
        "method": method_of(config),
        "sha256": hashlib.sha256((folder / WEIGHTS_NAME).read_bytes()).hexdigest(),
        **{name: config[name] for name in (*kept, "modules_to_save") if config.get(name)},
    }
    if (folder / PROVENANCE_NAME).exists():
        record["provenance"] = read_json(folder / PROVENANCE_NAME, "repair it or remove it")
    return record


def method_of(config: dict[str, Any]) -> str:
    """The name of an adapter's method."""
    if config["peft_type"] != "LORA":
        return str(config["peft_type"])
    return "DoRA" if config.get("use_dora") else "rsLoRA" if config.get("use_rslora") else "LoRA"


def write_adapter(
    target: Path,
    adapter: Adapter,
    *,
    provenance: dict[str, Any],
    side_files: Iterable[Path] = (),
    overwrite: bool = False,
) -> None:
    """Writes an adapter folder, whole or not at all.

    Raises:
        FileExistsError: `target` is not empty, and `overwrite` is off or it holds nothing of ours.
    """
    import torch
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in adapter.others.items()}
    for name, update in adapter.updates.items():
        parts = EMBEDDING_PARTS if update.of_embedding else LINEAR_PARTS
        for part, tensor in zip(parts, (update.a, update.b, update.magnitude), strict=True):
            if tensor is not None:
                tensors[name + part] = tensor.clone(memory_format=torch.contiguous_format)
    with atomic_folder(target, overwrite=overwrite) as folder:
        save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, folder / WEIGHTS_NAME, {"format": "pt"})
        write_json(folder / CONFIG_NAME, adapter.config)
        write_json(folder / PROVENANCE_NAME, provenance)
        copy_side_files(side_files, folder)


def copy_side_files(paths: Iterable[Path], folder: Path) -> None:
    """Copies files and folders into a folder; the later of two with the same name stays."""
    for path in paths:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, folder / path.name)


def side_files(folder: Path) -> list[Path]:
    """The tokenizer, template, generation config and licence that lie beside weights."""
    return sorted({path for pattern in SIDE_FILES for path in folder.glob(pattern)})


def described(updates: Mapping[str, Update], layers: int, full_names: bool) -> dict[str, Any]:
    """The fields of adapter_config.json that say which modules have which rank and scaling.

    Args:
        updates: by the full name of the module.
        layers: how many the base has; a last name stands for all of them where all are alike.
        full_names: name every module in full, for a base with modules of the same last name elsewhere.
    """
    settings = {name: (update.a.shape[0], update.scaling) for name, update in updates.items()}
    usual = Counter(settings.values()).most_common(1)[0][0] if settings else (8, 1.0)
    by_last: dict[str, list[str]] = {}
    for name in settings:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    target_modules: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for last, names in by_last.items():
        alike = len({settings[name] for name in names}) == 1
        everywhere = len(names) == (layers if ".layers." in names[0] else 1)
        shown = {last: names[0]} if alike and everywhere and not full_names else {name: name for name in names}
        target_modules += list(shown)
        for key, name in shown.items():
            rank, scaling = settings[name]
            if (rank, scaling) != usual:
                ranks[key], alphas[key] = rank, _alpha(scaling, rank)
    return {
        "r": usual[0],
        "lora_alpha": _alpha(usual[1], usual[0]),
        "use_rslora": False,  # the scaling is alpha / rank for every module now
        "target_modules": target_modules,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "layers_to_transform": None,
        "layers_pattern": None,
        "exclude_modules": None,
    }


def _alpha(scaling: float, rank: int) -> float:
    alpha = scaling * rank
    return int(alpha) if alpha == int(alpha) else alpha
