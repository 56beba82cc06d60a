"""How to serve a model at its full length with vLLM, SGLang and llama.cpp: the exact settings, not run here.

A folder whose config.json holds the scaling needs no override, only its length. The overrides are for a folder, or a
GGUF file, of the model as it was before. Sources: docs.vllm.ai (context extension), the Qwen3 and Qwen3.5 model cards,
llama.cpp's server README.
"""

from __future__ import annotations

import json
from typing import Any

from gated_qwen.configuration.context import yarn_attention_factor
from gated_qwen.configuration.rope_schema import read_length, read_rope, text_block

NOT_RUN = "not run here: check against the version that you use"


def engine_settings(config: dict[str, Any], folder: str) -> dict[str, dict[str, Any]]:
    """Commands for each engine, with the extended `folder` and with the model as it was before.

    Args:
        config: the content of the extended folder's config.json.
        folder: where it lies, for the commands.

    Returns:
        By engine: `folder`, the command for this folder; `override`, for the model as it was (`MODEL`), or None when
        there is nothing to override; `notes`.

    Example:
        >>> config = {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling":
        ...           {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
        >>> engine_settings(config, "m")["llama.cpp"]["override"].split(" -c ")[1]
        '131072 --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 --rope-freq-base 1000000'
    """
    rope, length = read_rope(config), read_length(config)
    code = " --trust-remote-code" if config.get("auto_map") else ""
    override: dict[str, Any] = {"max_position_embeddings": length, "rope_parameters": rope}
    if text_block(config) is not config:
        override = {"text_config": override}
    words = json.dumps(override)
    vllm, sglang = f"vllm serve {{}} --max-model-len {length}", "python -m sglang.launch_server --model-path {}"
    sglang += f" --context-length {length}"
    settings = {
        "vLLM": {
            "folder": vllm.format(folder) + code,
            "override": vllm.format("MODEL") + code + f" --hf-overrides '{words}'",
            "notes": [],
        },
        "SGLang": {
            "folder": sglang.format(folder) + code,
            "override": sglang.format("MODEL") + code + f" --json-model-override-args '{words}'",
            "notes": [],
        },
        "llama.cpp": _llama_cpp(config, rope, length),
    }
    if rope["rope_type"] == "default":
        settings = {engine: {**each, "override": None} for engine, each in settings.items()}
    return settings


def _llama_cpp(config: dict[str, Any], rope: dict[str, Any], length: int) -> dict[str, Any]:
    command = f"llama-server -m MODEL.gguf -c {length}"
    notes = []
    if str(config.get("model_type")).startswith("gated_qwen"):
        notes.append("it has no architecture called gated_qwen: MODEL.gguf is an export to one that it has")
    flags = None
    if rope["rope_type"] == "linear":
        flags = f" --rope-scaling linear --rope-scale {rope['factor']:.10g}"
    elif rope["rope_type"] == "yarn":
        flags = f" --rope-scaling yarn --rope-scale {rope['factor']:.10g}"
        flags += f" --yarn-orig-ctx {rope['original_max_position_embeddings']}"
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                flags += f" --yarn-{name.replace('_', '-')} {rope[name]:g}"
        if rope.get("truncate") is False:
            notes.append("it rounds the bounds of the blend always: truncate=False has no counterpart")
        if rope.get("attention_factor") is not None:
            ratio = rope["attention_factor"] / yarn_attention_factor(rope["factor"])
            notes.append(
                f"it computes 0.1 ln(factor) + 1 by itself; attention_factor {rope['attention_factor']:g} needs the "
                f"GGUF key rope.scaling.attn_factor = {ratio:.6g}"
            )
    elif rope["rope_type"] != "default":
        notes.append(f"{rope['rope_type']} scaling has no flags: it must lie in the GGUF file")
    if flags is not None:
        flags += f" --rope-freq-base {rope['rope_theta']:.10g}"
    return {"folder": command, "override": None if flags is None else command + flags, "notes": notes}
