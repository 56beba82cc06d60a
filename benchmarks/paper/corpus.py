"""Real text that every machine with this project has: the Python sources of the installed transformers."""

import hashlib
import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers

LARGEST_FILE = 100_000  # characters
EVALUATION_SHARE = 50  # one file in so many


def write_corpus(folder: Path, characters: int, seed: int = 0) -> dict[str, Any]:
    """Writes `train.jsonl` and `evaluation.jsonl`, one file of source code a line, and `corpus.json`, what they are.

    Args:
        folder: where they go; those of another size are written anew.
        characters: about how many, evaluation included.
        seed: of the order of the files.

    Returns:
        What `corpus.json` holds: version, sizes and SHA-256 of both files.
    """
    about = folder / "corpus.json"
    wanted = {"transformers": version("transformers"), "characters": characters, "seed": seed}
    if about.exists() and {**(known := json.loads(about.read_text())), **wanted} == known:
        return known
    root = Path(transformers.__file__).parent
    files = sorted(root.rglob("*.py"))
    random.Random(seed).shuffle(files)
    lines: dict[str, list[str]] = {"train": [], "evaluation": []}
    taken = 0
    for number, file in enumerate(files):
        text = file.read_text(encoding="utf-8")
        if not 200 < len(text) < LARGEST_FILE:
            continue
        lines["evaluation" if number % EVALUATION_SHARE == 0 else "train"].append(json.dumps({"text": text}) + "\n")
        taken += len(text)
        if taken >= characters:
            break
    folder.mkdir(parents=True, exist_ok=True)
    known = dict(wanted)
    for name, entries in lines.items():
        content = "".join(entries).encode()
        (folder / f"{name}.jsonl").write_bytes(content)
        known[name] = {"files": len(entries), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    about.write_text(json.dumps(known, indent=2) + "\n")
    return known
