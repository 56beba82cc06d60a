"""docs/publish.md as it stands, all of it, on a local Hub: push, load, LoRA, merge, push, serve, chat."""

import os
import socket
import string
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, LocalHub
from test_docs import BLOCK, ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from ungated import ungated_folder

import gated_qwen

PAGE = (ROOT / "docs" / "publish.md").read_text()
CHARACTERS = ["<pad>", "<unk>", *string.ascii_letters, *" .,?!'-"]  # 61 of the 64 tokens of a tiny model
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def character_tokenizer():
    """Each token is a character, so that a model of 64 tokens can be talked to."""
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(CHARACTERS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_it_answers(url, process, log, seconds=120):
    for _ in range(seconds * 5):
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        try:
            return urllib.request.urlopen(url).read()
        except urllib.error.HTTPError:
            return None
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not answer:\n{log.read_text()}")


@pytest.mark.slow
def test_the_page_runs_from_the_first_push_to_the_chat(tmp_path):
    for package in ("peft", "openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    ungated_folder(tmp_path / "my-llama", "llama")  # the reader's own model, which can be talked to
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path / "my-llama")
    port, served, log = free_port(), [], tmp_path / "server.log"
    with LocalHub() as hub:
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        output = []
        try:
            for block in BLOCK.finditer(PAGE):
                code = block["code"].replace("8000", str(port))
                shell = ["bash", "-euo", "pipefail", "-c", code]
                command = shell if block["language"] == "bash" else [sys.executable, "-c", code]
                if "gated-qwen serve" in code:
                    command[-1] = f"exec {code}"
                    with log.open("wb") as file:
                        served.append(
                            subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=file)
                        )
                    wait_until_it_answers(f"http://127.0.0.1:{port}/health", served[0], log)
                    continue
                run = subprocess.run(
                    command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
                )
                assert run.returncode == 0, f"{code}\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
                assert TOKEN not in run.stdout + run.stderr
                output.append(run.stdout)
        finally:
            for process in served:
                process.kill()
                process.wait()
        repositories = {name: hub.files(name) for name in hub.repositories}

    assert set(repositories) == {"me/my-model", "me/my-merged-model"}
    first, merged = repositories["me/my-model"], repositories["me/my-merged-model"]
    assert first["model.safetensors"] != merged["model.safetensors"]
    assert {name: first[name] for name in first if name.endswith(".py")} == {
        name: merged[name] for name in merged if name.endswith(".py")
    }
    model = gated_qwen.GatedQwenForCausalLM.from_pretrained(tmp_path / "my-merged-model")
    ids = torch.tensor([tokenizer("What does a gate do? ")["input_ids"]])  # as the chat template writes it
    written = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert output[-1].strip() == tokenizer.decode(written, skip_special_tokens=True).strip() != ""
