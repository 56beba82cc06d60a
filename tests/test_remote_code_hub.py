"""A pushed repository is enough: with torch and transformers alone it loads by its id, as remote code."""

import json

import pytest
import torch
from fresh_process import FreshProcess
from hub_server import OTHER_TOKEN, TOKEN
from huggingface_hub import CommitOperationAdd, HfApi
from publishable import CARD, connected, publishable_folder, word_tokenizer
from safetensors.torch import save_file
from tiny import tiny_model, tokens
from ungated import ungated_folder, ungated_model

import gated_qwen
from gated_qwen.conversion.convert import convert
from gated_qwen.model_cards.push import push

MARK = "\nMARK = 'other code'\n"


@pytest.fixture(scope="module")
def hub():
    with pytest.MonkeyPatch.context() as patch, connected(patch) as hub:
        yield hub


def save_reference(model, file):
    ids = tokens(2, 9)
    with torch.no_grad():
        save_file({"ids": ids, "output": model(ids)[0]}, file)


@pytest.fixture(scope="module")
def pushed(hub, tmp_path_factory):
    """me/model: two versions, v1 and v2 = main; a branch with other code. Returns shas and where the outputs lie."""
    folder = tmp_path_factory.mktemp("pushed")
    shas = {}
    for number, tag in enumerate(("v1", "v2")):
        model = tiny_model(gate_granularity="headwise", pad_token_id=0, seed=number)
        publishable_folder(folder / tag, model, **({"max_shard_size": "20kB"} if number else {}))
        save_reference(model, folder / f"{tag}.safetensors")
        shas[tag] = push(folder / tag, "me/model", tag=tag).commit
    api = HfApi()
    api.create_branch("me/model", branch="other-code", revision="v1")
    code = hub.files("me/model")["modeling_gated_qwen.py"] + MARK.encode()
    operation = CommitOperationAdd("modeling_gated_qwen.py", code)
    api.create_commit("me/model", [operation], commit_message="other code", revision="other-code")
    return folder, shas


# What runs in a process without the package; the first call decides which Hub it sees.


def connect(endpoint, home, token, offline=False):
    import os

    os.environ.update(
        HF_ENDPOINT=endpoint,
        HF_HOME=home,
        HF_TOKEN=token,
        HF_HUB_OFFLINE=str(int(offline)),
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DISABLE_TELEMETRY="1",
    )
    import transformers

    return transformers.__version__


def difference(repo_id, reference, auto_class, options):
    """How far the outputs are from the reference, and the class and the mark of the code that ran."""
    import sys

    import torch
    import transformers
    from safetensors.torch import load_file

    expected = load_file(reference)
    model = getattr(transformers, auto_class).from_pretrained(repo_id, trust_remote_code=True, **options).eval()
    with torch.no_grad():
        distance = (model(expected["ids"])[0] - expected["output"]).abs().max().item()
    module = sys.modules[type(model).__module__]
    return [distance, module.__name__.split(".")[0], type(model).__name__, getattr(module, "MARK", None)]


EQUAL = [0.0, "transformers_modules", "GatedQwenForCausalLM", None]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def process(hub, home, tmp_path_factory):
    with FreshProcess(tmp_path_factory.mktemp("process")) as process:
        process.call(connect, hub.endpoint, str(home), TOKEN)
        yield process


def load(process, repo_id, reference, auto_class="AutoModelForCausalLM", **options):
    return process.call(difference, repo_id, str(reference), auto_class, options)


@pytest.mark.parametrize("name", ["main", "v2", "v1", "sha of v1", "sha of v2"])
def test_it_loads_by_branch_tag_and_sha(process, pushed, name):
    folder, shas = pushed
    tag = "v2" if name == "main" else name.removeprefix("sha of ")
    revision = shas[tag] if name.startswith("sha") else name
    assert load(process, "me/model", folder / f"{tag}.safetensors", revision=revision) == EQUAL


def test_code_and_weights_are_pinned_apart_where_one_asks_for_it(process, pushed):
    """A revision pins both, whatever is pushed later; `code_revision` says otherwise for the code."""
    folder, shas = pushed
    other = [*EQUAL[:3], "other code"]
    reference = folder / "v1.safetensors"
    assert load(process, "me/model", reference, revision="v1", code_revision="other-code") == other
    assert load(process, "me/model", reference, revision="other-code") == other
    assert load(process, "me/model", reference, revision="other-code", code_revision=shas["v1"]) == EQUAL
    assert load(process, "me/model", reference, revision=shas["v1"]) == EQUAL


def test_it_is_refused_without_trust(process, pushed):
    def refusals(repo_id):
        import transformers

        said = []
        for auto_class in ("AutoConfig", "AutoModel", "AutoModelForCausalLM"):
            try:
                getattr(transformers, auto_class).from_pretrained(repo_id)
                said.append("loaded")
            except ValueError as error:
                said.append(str(error))
        return said

    for message in process.call(refusals, "me/model"):
        assert "custom code" in message and "trust_remote_code=True" in message


def test_every_auto_class_resolves_and_the_pipeline_writes(process, pushed):
    """By the id alone: the task comes from the card."""

    def resolve(repo_id):
        import transformers

        config = transformers.AutoConfig.from_pretrained(repo_id, trust_remote_code=True)
        found = [type(config).__name__]
        for auto_class in config.auto_map:
            if auto_class != "AutoConfig":
                model = getattr(transformers, auto_class).from_pretrained(repo_id, trust_remote_code=True)
                found.append([auto_class, type(model).__name__])
        generator = transformers.pipeline(model=repo_id, trust_remote_code=True)
        text = generator("w3 w1 w4", max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
        return found, text

    folder, _ = pushed
    (config_class, *found), text = process.call(resolve, "me/model")
    auto_map = json.loads((folder / "v2" / "config.json").read_text())["auto_map"]
    assert config_class == "GatedQwenConfig"
    assert {"AutoConfig": config_class, **dict(found)} == {
        name: place.split(".")[1] for name, place in auto_map.items()
    }
    model = gated_qwen.GatedQwenForCausalLM.from_pretrained(folder / "v2")
    ids = word_tokenizer()("w3 w1 w4", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    assert [int(word[1:]) for word in text.split()] == [token for token in expected if token]  # w0 is padding
    assert "not supported" not in process.output


def test_a_pull_request_can_be_tried_before_it_is_merged(process, hub, pushed):
    folder, _ = pushed
    push(folder / "v1", "me/model", create_pr=True)
    assert load(process, "me/model", folder / "v1.safetensors", revision="refs/pr/1") == EQUAL


def test_converted_and_merged_models_load_from_their_repositories(process, hub, tmp_path):
    peft = pytest.importorskip("peft")
    convert(ungated_folder(tmp_path / "ungated", "qwen3"), tmp_path / "converted", gate="headwise")
    (tmp_path / "converted" / "README.md").write_text(CARD)
    push(tmp_path / "converted", "me/converted")
    save_reference(ungated_model("qwen3"), tmp_path / "converted.safetensors")
    assert load(process, "me/converted", tmp_path / "converted.safetensors") == EQUAL

    base = gated_qwen.GatedQwenForCausalLM.from_pretrained(tmp_path / "converted")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "g_proj"], init_lora_weights=False))
    merged = adapted.merge_and_unload()
    push(publishable_folder(tmp_path / "merged", merged), "me/merged")
    save_reference(merged, tmp_path / "merged.safetensors")
    assert load(process, "me/merged", tmp_path / "merged.safetensors") == EQUAL


def test_a_mixture_of_experts_loads(process, hub, tmp_path):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "pad_token_id": 0}
    model = tiny_model(gated_qwen.GatedQwenMoeForCausalLM, **fields)
    push(publishable_folder(tmp_path / "experts", model), "me/experts")
    save_reference(model, tmp_path / "experts.safetensors")
    assert load(process, "me/experts", tmp_path / "experts.safetensors") == [
        0.0,
        "transformers_modules",
        "GatedQwenMoeForCausalLM",
        None,
    ]


def test_a_model_that_came_as_remote_code_is_pushed_on_whole(process, hub, pushed):
    """`push_to_hub` where this package is not installed: the code travels on, and `push` would take the repository."""

    def push_on(source, target):
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        model.push_to_hub(target)
        transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=True).push_to_hub(target)

    folder, _ = pushed
    process.call(push_on, "me/model", "me/again")
    files = hub.files("me/again")
    code = {path.name: path.read_bytes() for path in (folder / "v1").glob("*.py")}
    assert {name: files[name] for name in code} == code
    auto_map = json.loads(files["config.json"])["auto_map"]
    assert auto_map == json.loads((folder / "v1" / "config.json").read_text())["auto_map"]
    assert load(process, "me/again", folder / "v2.safetensors") == EQUAL


def test_only_who_may_see_a_private_repository_loads_it(process, hub, pushed, tmp_path):
    folder, _ = pushed
    push(folder / "v1", "me/hidden", private=True)
    assert load(process, "me/hidden", folder / "v1.safetensors") == EQUAL

    def refusal(repo_id):
        import transformers

        try:
            transformers.AutoModelForCausalLM.from_pretrained(repo_id, trust_remote_code=True)
        except OSError as error:
            return str(error)

    with FreshProcess(tmp_path / "process") as stranger:
        stranger.call(connect, hub.endpoint, str(tmp_path / "home"), OTHER_TOKEN)
        assert "me/hidden is not a local folder and is not a valid model identifier" in stranger.call(
            refusal, "me/hidden"
        )


def test_it_loads_again_without_a_connection(process, hub, home, pushed, tmp_path):
    """From the cache, code included; the Hub is not asked."""
    folder, _ = pushed
    assert load(process, "me/model", folder / "v2.safetensors") == EQUAL
    requests = len(hub.log)
    with FreshProcess(tmp_path / "process") as offline:
        offline.call(connect, hub.endpoint, str(home), TOKEN, True)
        assert load(offline, "me/model", folder / "v2.safetensors") == EQUAL
    assert len(hub.log) == requests
