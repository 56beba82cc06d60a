"""The whole diagnosis of a model: every probe at once, in one pass over token sequences."""

import datetime
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gated_qwen.diagnostics.activation_probe import ActivationProbe
from gated_qwen.diagnostics.attention_probe import AttentionProbe
from gated_qwen.diagnostics.decoder import decoder_body
from gated_qwen.diagnostics.diagnosis import KINDS, SCHEMA, SCHEMA_VERSION, Diagnosis, finite
from gated_qwen.diagnostics.gate_probe import GateProbe
from gated_qwen.diagnostics.router_probe import RouterProbe

ONE_PASS = 4096  # tokens; a longer sequence is read in chunks of `CHUNK`, so that activations stay small
CHUNK = 2048
MAXIMA = ("mean_of_layer_maxima", "max_over_layers", "max_index")
AVERAGING = "mean over layers of the mean over heads of the mean over queries"
MASK_POLICY = "causal, no padding; every sequence is one document"


@dataclass(frozen=True)
class ProbeSettings:
    """What the probes measure.

    Attributes:
        skip_queries: queries at the start of a document that the *_skipped numbers leave out.
        head_keys: how many of the first visible keys the head share sums.
        keys: positions of single keys whose share is measured.
        columns: `"off"`, `"sample"` (some queries) or `"all"`: how the share of every key is found.
        top: how many of the largest activations of each layer are kept.
    """

    skip_queries: int = 64
    head_keys: int = 4
    keys: tuple[int, ...] = (0, 1, 2, 3)
    columns: str = "sample"
    top: int = 10


class Probes:
    """The attention, activation, gate and router probes of a model, entered and left together.

    Args:
        model: a Hugging Face causal LM.
        settings: what to measure.

    Example:
        >>> import torch
        >>> from transformers import LlamaForCausalLM
        >>> model = LlamaForCausalLM.from_pretrained(llama_folder)
        >>> with Probes(model) as probes:
        ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
        >>> sorted(probes.summary()), len(probes.summary()["attention"]["layers"])
        (['activations', 'attention', 'gates', 'routers'], 2)
    """

    def __init__(self, model: Any, settings: ProbeSettings | None = None) -> None:
        settings = settings or ProbeSettings()
        self.attention = AttentionProbe(
            model,
            skip_queries=settings.skip_queries,
            head_keys=settings.head_keys,
            keys=settings.keys,
            columns=settings.columns,
        )
        self.activations = ActivationProbe(model, top=settings.top)
        self.routers = RouterProbe(model)
        self.gates: GateProbe | None = None
        self.unread_gates = ""  # why the model's gates cannot be read
        try:
            self.gates = GateProbe(model, attention=self.attention, skip_queries=settings.skip_queries)
        except ValueError as error:
            self.unread_gates = str(error)
        self._stack = ExitStack()

    def __enter__(self) -> "Probes":
        with ExitStack() as stack:
            for probe in (self.attention, self.activations, self.gates, self.routers):
                if probe is not None:
                    stack.enter_context(probe)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def summary(self) -> dict[str, Any]:
        """The sections `attention`, `activations`, `gates` and `routers` of a diagnosis.

        What is not finite is None, and so are gates and routers of a model that has none; a kind of activation that no
        layer has is an empty list.
        """
        activations = self.activations.statistics.summary()
        for kind in KINDS:
            activations.setdefault(kind, [])
            activations["summary"].setdefault(kind, dict.fromkeys(MAXIMA))
        sections: dict[str, Any] = finite(
            {
                "attention": self.attention.statistics.summary(),
                "activations": activations,
                "gates": self.gates.statistics.summary() if self.gates else None,
                "routers": self.routers.statistics.summary(),
            }
        )
        return sections


@torch.no_grad()
def diagnose(
    model: Any,
    input_ids: Sequence[Sequence[int]] | torch.Tensor,
    *,
    name: str = "",
    source: dict[str, Any] | None = None,
    tokenizer: Any = None,
    settings: ProbeSettings | None = None,
    chunk: int | None = None,
    batch_size: int = 1,
    start: Callable[[int], None] = lambda total: None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Diagnosis:
    """Measures attention, activations and gates of a model on token sequences of one length.

    Only the decoder's body runs, so there are no logits. The model's mode and attention implementation are as before
    when it ends, however it ends.

    Args:
        model: any Hugging Face causal LM.
        input_ids: (sequences, length) token ids without padding; each sequence is one document.
        name: how results call the model; its class when empty.
        source: `text`, `sha256`, `first_token` and `offset` of the sequences, as `TextSequences.source` has them.
        tokenizer: writes the tokens of the largest activations; None leaves their ids.
        settings: of the probes.
        chunk: prefill in chunks of so many tokens, through a cache; None: `CHUNK` for sequences longer than `ONE_PASS`
            if all layers are softmax attention, else one pass.
        batch_size: sequences at a time.
        start: called with the number of tokens.
        progress: called with the number of tokens that were read.

    Returns:
        What `write_diagnoses` and `write_report` take: see docs/diagnostics.md.

    Raises:
        ValueError: sequences of no or of different length, or a model that a probe cannot read.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> model = LlamaForCausalLM.from_pretrained(llama_folder)
        >>> diagnosis = diagnose(model, [[1, 2, 3, 4, 5, 6, 7, 8]], settings=ProbeSettings(skip_queries=2))
        >>> round(diagnosis["attention"]["layers"][0]["uniform"], 6)  # (1 + 1/2 + ... + 1/8) / 8
        0.339732
    """
    settings = settings or ProbeSettings()
    if isinstance(input_ids, torch.Tensor):
        input_ids = input_ids.tolist()
    lengths = {len(sequence) for sequence in input_ids}
    if len(lengths) != 1 or not min(lengths):
        raise ValueError(f"the sequences have lengths {sorted(lengths)}; one length of at least 1 token is needed")
    ids = torch.tensor(input_ids, device=model.device)
    chunk = chunk_size(model, ids.shape[1], chunk)
    probes = Probes(model, settings)
    start(ids.numel())
    began = time.monotonic()
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with probes:
            for batch in ids.split(batch_size):
                read_in_chunks(model, batch, chunk, progress)
    finally:
        for module, mode in training.items():
            module.training = mode
    sections = probes.summary()
    seconds = time.monotonic() - began
    if tokenizer is not None:
        _write_tokens(sections["activations"], tokenizer)
    source = source or {"text": "token ids", "sha256": "", "first_token": f"token {int(ids[0, 0])}", "offset": 0}
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "model": _model_facts(model, name, sections["gates"], probes.unread_gates),
        "input": {
            **source,
            "tokens": ids.numel(),
            "sequences": len(ids),
            "length": ids.shape[1],
            "chunk": chunk if chunk < ids.shape[1] else None,
            "mask_policy": MASK_POLICY,
            "averaging": AVERAGING,
        },
        "settings": {**asdict(settings), "keys": list(settings.keys), "batch_size": batch_size},
        "versions": _versions(model),
        "measured": datetime.date.today().isoformat(),
        "cost": {"seconds": round(seconds, 3), "peak_bytes": _peak_bytes(model.device)},
        **sections,
    }


def read_in_chunks(
    model: Any,
    input_ids: torch.Tensor,
    chunk: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Runs the decoder's body, which makes no logits, over (B, T) tokens, in one pass or in chunks with a cache.

    Args:
        model, chunk, progress: as `diagnose`.
        input_ids: (B, T) on the model's device.
    """
    body, chunk = decoder_body(model), chunk_size(model, input_ids.shape[1], chunk)
    if chunk >= input_ids.shape[1]:
        body(input_ids=input_ids, use_cache=False)
        progress(input_ids.numel())
        return
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache_name = "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"
    for piece in input_ids.split(chunk, dim=1):
        body(input_ids=piece, use_cache=True, **{cache_name: cache})
        progress(piece.numel())


def chunk_size(model: Any, length: int, chunk: int | None = None) -> int:
    """The chunk that `diagnose` takes where none is given, or the one given.

    Linear attention is read in one pass: not every version of it goes on from a cache with more than one token.
    """
    if chunk is not None:
        if chunk < 1:
            raise ValueError(f"chunk {chunk}: at least 1 token is needed")
        return chunk
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    softmax = all("attention" in kind and "linear" not in kind for kind in kinds)
    return CHUNK if length > ONE_PASS and softmax else length


def _model_facts(model: Any, name: str, gates: dict[str, Any] | None, unread_gates: str) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    facts = {
        "name": name or type(model).__name__,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "query_heads": heads,
        "key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": config._attn_implementation or "eager",
        "gate": {"not read": unread_gates} if unread_gates else None,
    }
    if gates:
        layers = gates["layers"]
        facts["gate"] = {
            "positions": list(dict.fromkeys(layer["position"] for layer in layers)),
            **{field: layers[0][field] for field in ("granularity", "activation", "operation")},
        }
    return facts


def _write_tokens(activations: dict[str, Any], tokenizer: Any) -> None:
    """Puts each token's text beside its id; where a tokenizer decodes a lone one to nothing, its own name for it."""
    for kind in KINDS:
        for block in activations[kind]:
            for top in block["top"]:
                if top["token_id"] is not None:
                    token_id = top["token_id"]
                    top["token"] = tokenizer.decode([token_id]) or tokenizer.convert_ids_to_tokens(token_id)


def _versions(model: Any) -> dict[str, str]:
    import transformers

    from gated_qwen import __version__

    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "gated_qwen": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": python,
        "device": device,
    }


def _peak_bytes(device: torch.device) -> int | None:
    """The most memory so far, the model's included: the GPU's for a model there, else this process's (Linux)."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])
