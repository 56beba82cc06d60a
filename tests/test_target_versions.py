"""The native folders give our logits on the older versions of transformers that they are for."""

import json
import os
import subprocess
import sys

import pytest
import torch
from cache import offline
from tiny import tiny_model, tokens
from versions import INSTALLED, VERSIONS, VersionUnavailable, environment

from gated_qwen.conversion.convert import convert

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e6}
CODE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
found = {}
for folder, prompt in json.loads(sys.argv[1]).items():
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(prompt)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    found[folder] = [logits.tolist(), model.generate(ids[:1], max_new_tokens=8, do_sample=False).tolist()]
print("FOUND" + json.dumps(found))
"""
# The first version that knows the class.
SINCE = {"qwen3_next": (4, 57), "qwen3_5": (5, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("version", [version for version in VERSIONS if version != INSTALLED])
def test_an_export_with_the_identity_layer_runs_on(version, tmp_path):
    try:
        path = environment(version)
    except VersionUnavailable as error:
        (pytest.skip if offline() else pytest.fail)(str(error))
    number = tuple(int(part) for part in version.split(".")[:2])
    ids = tokens(2, 12)
    expected = {}
    for rope in ({"rope_type": "default", "rope_theta": 1e6}, YARN):
        model = tiny_model(rope_parameters=rope)
        model.save_pretrained(tmp_path / rope["rope_type"])
        for target in (target for target, since in SINCE.items() if number >= since):
            folder = tmp_path / f"{rope['rope_type']}-{target}"
            convert(tmp_path / rope["rope_type"], folder, to=target, identity_layer=True)
            with torch.no_grad():
                written = model.generate(ids[:1], max_new_tokens=8, do_sample=False).tolist()
                expected[str(folder)] = (model(ids).logits, written)
    arguments = json.dumps({folder: ids.tolist() for folder in expected})
    run = subprocess.run(
        [sys.executable, "-c", CODE, arguments],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.split("FOUND")[1])
    for folder, (logits, written) in expected.items():
        assert (torch.tensor(found[folder][0]) - logits).abs().max() < 1e-5, folder
        assert found[folder][1] == written, folder
