"""The usual servers and clients take our models: transformers' own server, the OpenAI client, compiled generation."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from small_tokenizers import tokenizer_of
from tiny import tiny_model, tokens
from transformers import AutoTokenizer, CompileConfig

from gated_qwen.cli.serve import _warn_without_chat_template
from gated_qwen.conversion.convert import convert

VARIANTS = {"elementwise": {}, "headwise": {"gate_granularity": "headwise"}}
# ChatML, by whose marks the server finds the answer of a Qwen model.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the grass is green"}]
START_S = 120
GATED = "import gated_qwen.cli as cli; cli.main()"
# The library's command without its search for a newer version.
PLAIN = "from transformers.cli.transformers import app; app()"


# Compiled generation with a static cache


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_generation_with_a_static_cache_gives_the_plain_tokens(variant):
    model = tiny_model(**VARIANTS[variant])
    arguments = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(tokens(2, 7), **arguments)
    # A CPU is compiled for on demand only, and C++ for a tiny model takes a minute.
    compile_config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = model.generate(tokens(2, 7), **arguments, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled
    assert not torch._dynamo.utils.counters["graph_break"]


# Servers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A gated model with tokenizer and chat template, and its export to Qwen3.5."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = tokenizer_of("byte-level BPE")
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=None, bos_token_id=None, pad_token_id=3)
    # Half of a character, as a random model writes, is cut off by some ways of decoding and not by others.
    words = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    model.generation_config.suppress_tokens = [t for t, word in words.items() if not re.fullmatch("[a-z ]+", word)]
    model.save_pretrained(folder / "gated")
    tokenizer.save_pretrained(folder / "gated")
    convert(folder / "gated", folder / "exported", to="qwen3_5")
    return folder


def test_a_tokenizer_without_a_chat_template_is_named_before_the_server_starts(folders, tmp_path, capsys):
    _warn_without_chat_template(str(folders / "gated"))
    _warn_without_chat_template(str(tmp_path / "nothing here"))
    assert capsys.readouterr().err == ""
    tokenizer = AutoTokenizer.from_pretrained(folders / "gated")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    _warn_without_chat_template(str(tmp_path))
    assert "no chat template" in capsys.readouterr().err


def test_a_mistyped_folder_is_refused_before_the_hub_is_asked(run_command, tmp_path):
    pytest.importorskip("fastapi", reason="the server needs transformers[serving]")
    code, _, err = run_command("serve", tmp_path / "nowhere")
    assert code == 1 and err == f"gated-qwen: {tmp_path / 'nowhere'}: no such folder\n"


@contextmanager
def serving(code, folder, log, *options):
    """The address of a server in a process of its own; the process ends with the block."""
    pytest.importorskip("fastapi", reason="the server needs transformers[serving]")
    pytest.importorskip("uvicorn", reason="the server needs transformers[serving]")
    pytest.importorskip("openai", reason="the server and its client need the package openai")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", code, "serve", str(folder), "--device", "cpu", "--port", port, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            _wait_until_healthy(process, f"http://localhost:{port}/health", log)
            yield f"http://localhost:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_healthy(process, address, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server does not answer; it printed:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def server(folders):
    with serving(GATED, folders / "gated", folders / "log.txt") as address:
        yield address


def ask(address, folder, **options):
    from openai import OpenAI

    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    return client.chat.completions.create(
        model=str(folder), messages=MESSAGES, max_tokens=8, temperature=0, timeout=120, **options
    )


@pytest.fixture(scope="module")
def expected(folders):
    """What the model says in this process."""
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folders / "gated")
    model = AutoModelForCausalLM.from_pretrained(folders / "gated")
    inputs = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_the_openai_client_gets_what_the_model_generates(server, folders, expected):
    answer = ask(server, folders / "gated")
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_the_openai_client_gets_it_as_a_stream(server, folders, expected):
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(server, folders / "gated", stream=True)]
    assert "".join(pieces) == expected
    assert sum(map(bool, pieces)) > 1


@pytest.mark.slow
def test_the_openai_client_completes_a_text(server, folders):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model=str(folders / "gated"), prompt="the grass is", max_tokens=8, temperature=0, timeout=120
    )
    assert answer.usage.completion_tokens == 8 and answer.choices[0].text


@pytest.mark.slow
def test_transformers_chat_talks_to_it(server, folders, tmp_path):
    command = [sys.executable, "-c", PLAIN, "chat", str(folders / "gated"), server, "max_new_tokens=8"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}  # else the client refuses this machine's own address too
    run = subprocess.run(
        [*command, "do_sample=False"],
        input="the grass is green\n!exit\n",
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "8 tokens in" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
def test_continuous_batching_serves_the_same(folders, expected):
    log, options = folders / "continuous.txt", ("--cb-block-size", "32", "--cb-num-blocks", "16")
    with serving(GATED, folders / "gated", log, "--continuous-batching", *options) as address:
        assert ask(address, folders / "gated").choices[0].message.content == expected


@pytest.mark.slow
def test_an_export_to_qwen3_5_needs_nothing_of_ours(folders, expected):
    blocked = f"import sys; sys.modules['gated_qwen'] = None; {PLAIN}"
    with serving(blocked, folders / "exported", folders / "exported.txt") as address:
        assert ask(address, folders / "exported").choices[0].message.content == expected


def test_the_server_is_told_of_our_classes_and_of_its_own_options(run_command, monkeypatch, tmp_path):
    import transformers.cli.transformers

    import gated_qwen

    classes = [name for name in gated_qwen.__all__ if "For" in name]
    for name in classes:
        monkeypatch.setattr(transformers, name, None, raising=False)  # taken away again after the test
    calls = []
    monkeypatch.setattr(transformers.cli.transformers, "app", lambda args, **_: calls.append(args))
    assert run_command("serve", tmp_path, "--port", "1", "--trust-remote-code")[0] == 0
    assert calls == [["serve", str(tmp_path), "--port", "1", "--trust-remote-code"]]
    assert "GatedQwenForCausalLM" in classes
    assert all(getattr(transformers, name) is getattr(gated_qwen, name) for name in classes)
