"""What is trained, as a table: every run is a variant, a seed and what is changed for it.

sweep      `VARIANTS` on source code, each from random weights
emergence  three of them at a learning rate, and without the query/key norms, at which the baseline grows a sink
ladder     the three at learning rates up to where training breaks; `ladder-no-norm` without the query/key norms
backcopy   the variants on the Bigram-Backcopy task, where an attention sink forms; `backcopy-long` for longer
retrofit   a finished baseline of the sweep or of backcopy goes on without and with a gate from the identity start
context    a finished sweep model at RoPE base 1,000,000 and four times its length
"""

from dataclasses import dataclass, field
from typing import Any

RECIPE = "paper-in-small"
UNGATED: dict[str, Any] = {"gate_positions": []}
HEADWISE: dict[str, Any] = {"gate_positions": ["attn_output"], "gate_granularity": "headwise"}
ELEMENTWISE: dict[str, Any] = {"gate_positions": ["attn_output"]}

# Table 1 of the paper, and what it calls them; the most telling first.
VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": UNGATED,
    "G1 elementwise": ELEMENTWISE,
    "G1 headwise": HEADWISE,
    "G2 value": {"gate_positions": ["value"]},
    "G1 NS-sigmoid": {**ELEMENTWISE, "gate_activation": "ns_sigmoid"},
    "G1 constant": {**ELEMENTWISE, "gate_input": "constant"},
    "G1 head-shared": {**ELEMENTWISE, "gate_head_shared": True},
    "G1 SiLU": {**ELEMENTWISE, "gate_activation": "silu"},
    "G1 additive SiLU": {**ELEMENTWISE, "gate_operation": "add", "gate_activation": "silu"},
    "per-head norm": {**UNGATED, "attn_output_norm": True},
    "SiLU on the output": {**UNGATED, "attn_output_activation": "silu"},
    "G3 key": {"gate_positions": ["key"]},
    "G4 query": {"gate_positions": ["query"]},
    "G5 dense output": {"gate_positions": ["dense_output"]},
    "G1 elementwise, matched": ELEMENTWISE,  # its FFN shrunk to the baseline's total
}
MATCHED = "G1 elementwise, matched"
MAIN = ("baseline", "G1 elementwise", "G1 headwise")
LADDER = (4e-3, 1.6e-2, 6.4e-2, 2.56e-1)
LADDERS: dict[str, dict[str, Any]] = {"ladder": {}, "ladder-no-norm": {"model.set.use_qk_norm": False}}
EMERGENCE: dict[str, Any] = {
    "model.set.use_qk_norm": False,
    "trainer.learning_rate": 1.2e-2,
    "trainer.lr_scheduler_type": "constant_with_warmup",  # the sink fades as the rate falls
    "trainer.warmup_steps": 100,
    "diagnostics.every": 25,
    "diagnostics.sequences": 16,
}
GATES = (None, "headwise", "elementwise")  # of a retrofit


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        experiment: of the list above; a retrofit names what it goes on with, as in `retrofit-text`.
        variant: a key of `VARIANTS`; for a retrofit the gate that the baseline is given, `none` among them.
        seed: of weights and order.
        changes: fields of the recipe by their path; for backcopy, fields of the config.
        source: the name of the run whose model this one goes on with.
        gate: what `gated-qwen convert --gate` makes of the source first.
    """

    experiment: str
    variant: str
    seed: int
    changes: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    gate: str | None = None

    @property
    def name(self) -> str:
        rate = self.changes.get("trainer.learning_rate")
        words = [self.experiment, self.variant, *([f"lr{rate:g}"] if "ladder" in self.experiment else []), self.seed]
        return "-".join(str(word).replace(",", "").replace(" ", "_") for word in words)

    @property
    def about(self) -> dict[str, Any]:
        """What every result says of its run."""
        return {name: getattr(self, name) for name in ("name", "experiment", "variant", "seed", "changes", "source")}


def runs(seeds: int, more_seeds: int) -> list[Run]:
    """All runs in the order in which they are worth having.

    Args:
        seeds: of every variant.
        more_seeds: of `MAIN`, and of what is built on them.
    """
    every, main = range(seeds), range(max(seeds, more_seeds))
    found = [_backcopy(variant, seed) for seed in main for variant in MAIN]
    found += [_retrofit("backcopy", gate, seed) for seed in main for gate in GATES]
    found += [_sweep(variant, 0) for variant in MAIN]
    found += [_backcopy(variant, seed) for seed in every for variant in VARIANTS if variant not in (*MAIN, MATCHED)]
    found += [_sweep(variant, seed) for seed in every for variant in VARIANTS if seed > 0 or variant not in MAIN]
    found += [_emergence(variant, 0) for variant in MAIN]
    found += [_ladder(name, variant, rate, 0) for name in LADDERS for rate in LADDER for variant in MAIN]
    found += [_retrofit("text", gate, seed) for seed in every for gate in GATES]
    found += [_context(variant, seed) for seed in every for variant in MAIN]
    found += [_backcopy(variant, seed, "backcopy-long") for seed in main for variant in MAIN]
    found += [_retrofit("backcopy-long", gate, seed) for seed in main for gate in GATES]
    found += [_emergence(variant, seed) for seed in main[1:] for variant in MAIN]
    found += [_sweep(variant, seed) for seed in range(seeds, more_seeds) for variant in MAIN]
    for seed in every[1:]:
        found += [_ladder(name, variant, rate, seed) for name in LADDERS for rate in LADDER for variant in MAIN]
    return found


def _backcopy(variant: str, seed: int, experiment: str = "backcopy") -> Run:
    return Run(experiment, variant, seed, VARIANTS[variant])


def _fresh(variant: str) -> dict[str, Any]:
    # A preset with a gate, since only an addition to a baseline can be matched.
    gated = {} if variant == "baseline" else {"model.preset": "tiny-elementwise"}
    matched = {"model.match_parameters": True} if variant == MATCHED else {}
    return {**gated, **matched, **{f"model.set.{name}": value for name, value in VARIANTS[variant].items()}}


def _sweep(variant: str, seed: int) -> Run:
    return Run("sweep", variant, seed, {**_fresh(variant), "trainer.seed": seed})


def _emergence(variant: str, seed: int) -> Run:
    return Run("emergence", variant, seed, {**_fresh(variant), "trainer.seed": seed, **EMERGENCE})


def _ladder(experiment: str, variant: str, rate: float, seed: int) -> Run:
    shorter = {"trainer.learning_rate": rate, "trainer.max_steps": 200, "trainer.warmup_steps": 20}
    return Run(experiment, variant, seed, {**_fresh(variant), **LADDERS[experiment], "trainer.seed": seed, **shorter})


def _retrofit(task: str, gate: str | None, seed: int) -> Run:
    first = _sweep("baseline", seed) if task == "text" else _backcopy("baseline", seed, task)
    order = {"trainer.seed": 100 + seed, "trainer.learning_rate": 2e-3} if task == "text" else {}
    return Run(f"retrofit-{task}", gate or "none", seed, order, source=first.name, gate=gate)


def _context(variant: str, seed: int) -> Run:
    longer = {
        "data.length": 1024,
        "trainer.max_steps": 80,
        "trainer.warmup_steps": 10,
        "trainer.learning_rate": 1e-3,
        "trainer.per_device_train_batch_size": 2,
        "trainer.per_device_eval_batch_size": 2,
        "trainer.seed": 200 + seed,
    }
    return Run("context", variant, seed, longer, source=_sweep(variant, seed).name)
