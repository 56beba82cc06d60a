"""One remote-code file for every supported transformers: the same numbers on each, and back again.

The package saves models with the installed transformers. A process for each version, without the package, loads them
as remote code, computes, saves, and loads what the other versions saved.
"""

import json
import re

import pytest
import torch
from fresh_process import FreshProcess
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_moe_model, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from versions import INSTALLED, VERSIONS, VersionUnavailable, environment, offline

import gated_qwen

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CAUSAL_LMS = {
    "elementwise": {"gate_granularity": "elementwise"},
    "headwise": {"gate_granularity": "headwise"},
    "elementwise_yarn": {"gate_granularity": "elementwise", "rope_parameters": YARN},
    "headwise_yarn": {"gate_granularity": "headwise", "rope_parameters": YARN, "tie_word_embeddings": True},
    "all_positions": {
        "gate_positions": ["query", "key", "value", "attn_output", "dense_output"],
        "gate_activation": "ns_sigmoid",
        "gate_input_channels": 8,
        "gate_bias": True,
        "attn_output_norm": True,
        "sandwich_norm": True,
        "attention_bias": True,
        "attention_out_bias": False,
        "rope_parameters": LLAMA3,
    },
    "constant": {
        "gate_positions": ["query", "key", "value", "attn_output"],
        "gate_granularity": "headwise",
        "gate_input": "constant",
        "gate_head_shared": True,
        "gate_activation": "softplus",
        "attn_output_activation": "silu",
        "use_qk_norm": False,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "additive": {"gate_positions": ["value", "attn_output"], "gate_operation": "add", "gate_activation": "silu"},
    "ungated": {"gate_positions": []},
}
MOE_CAUSAL_LMS = {
    "moe": {"gate_granularity": "headwise"},
    "moe_yarn": {"rope_parameters": YARN, "tie_word_embeddings": True, "norm_topk_prob": False, "mlp_only_layers": []},
    "moe_sliding": {
        "gate_positions": ["value", "attn_output"],
        "use_sliding_window": True,
        "sliding_window": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    },
    "moe_ungated": {"gate_positions": []},
}
CAUSAL_LMS |= MOE_CAUSAL_LMS
HEADS = {
    "AutoModel": "Model",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}
AUTO_CLASSES = {
    **dict.fromkeys(CAUSAL_LMS, "AutoModelForCausalLM"),
    **{head: head for head in HEADS},
    **{f"moe {head}": head for head in HEADS},
}
FILES = ["configuration_gated_qwen.py", "modeling_gated_qwen.py", "rope_parameters.py"]
MOE_FILES = ["configuration_gated_qwen_moe.py", "modeling_gated_qwen_moe.py"]


def is_moe(name):
    return name.startswith("moe")


def tolerance(name):
    """Versions add up the outputs of experts in different orders; everything else is the same to the bit."""
    return 1e-5 if is_moe(name) else 0.0


# These run in the processes, on every version.


def load(folder, auto_class="AutoModelForCausalLM", **options):
    import transformers

    return getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True, **options).eval()


def greedy(model, ids, **options):
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=ids.new_ones(ids.shape), **options).tolist()


def continued(model, ids):
    """Logits (B, T, vocabulary) in two steps through a cache that the caller makes, empty and so falsy at first."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    steps = [model(part, past_key_values=cache, use_cache=True)[0] for part in (ids[:, :5], ids[:, 5:])]
    assert cache.get_seq_length() == ids.shape[1]
    return torch.cat(steps, dim=1)


def measure(folder, auto_class, reference, target=None):
    """Loads, compares with the reference and, with a target, tries every way to generate and saves there."""
    import torch
    from safetensors.torch import load_file

    torch.manual_seed(0)
    expected = load_file(reference)
    ids = expected["ids"]
    model = load(folder, auto_class, attn_implementation="eager")
    body = getattr(model, "model", model)
    with torch.no_grad():
        found = {
            "module": type(model).__module__,
            "eager": (model(ids)[0] - expected["eager"]).abs().max().item(),
            "inv_freq": (body.rotary_emb.inv_freq - expected["inv_freq"]).abs().max().item(),
            "rope": [model.config.rope_theta, model.config.rope_scaling, model.config.rope_parameters],
        }
        if auto_class == "AutoModelForCausalLM":
            found["cached"] = greedy(model, ids)
        if target is not None:
            sdpa = load(folder, auto_class, attn_implementation="sdpa")
            found["sdpa"] = (sdpa(ids)[0] - expected["sdpa"]).abs().max().item()
            if auto_class == "AutoModelForCausalLM":
                found["cached_sdpa"] = greedy(sdpa, ids)
                found["uncached"] = greedy(model, ids, use_cache=False)
                found["static"] = greedy(model, ids, cache_implementation="static")
                found["continued"] = (continued(model, ids) - expected["eager"]).abs().max().item()
            model.save_pretrained(target)
            saved = load(target, auto_class, attn_implementation="eager")
            found["reloaded"] = (saved(ids)[0] - expected["eager"]).abs().max().item()
    return found


def gate_start(ungated, configured):
    """How the gates start when an ungated checkpoint is loaded into a gated class, and when one is built afresh."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    plain = load(ungated).state_dict()
    config = AutoConfig.from_pretrained(configured, trust_remote_code=True)
    found = {}
    for std in (0.0, 0.5):
        config.gate_initializer_range = std
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        for way, model in (("loaded", load(configured, config=config)), ("built", built)):
            state = model.state_dict()
            gates = torch.cat([value.flatten() for name, value in state.items() if name not in plain])
            found[f"{way} {std}"] = [gates.numel(), gates.std().item(), gates.abs().max().item()]
        state = load(configured, config=config).state_dict()
        found[f"rest {std}"] = all(torch.equal(state[name], value) for name, value in plain.items())
    return found


def router_losses(folder, ids):
    """Loss, load-balancing loss and z-loss, or the error that says why there are none."""
    import json

    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.output_router_logits, config.router_z_loss_coef = True, 0.1
    try:
        model = load(folder, config=config)
    except RuntimeError as error:
        return str(error)
    ids = torch.tensor(json.loads(ids))
    output = model(ids, labels=ids)
    return [output.loss.item(), output.aux_loss.item(), output.z_loss.item()]


def text_from_pipeline(folder, tokenizer_file):
    import transformers
    from transformers import PreTrainedTokenizerFast, pipeline

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, pad_token="w0")
    generator = pipeline("text-generation", model=folder, tokenizer=tokenizer, trust_remote_code=True)
    text = generator("w3 w1 w4", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    return [transformers.__version__, type(generator.model).__module__, text]


# These run here.


def class_of(name):
    family = "GatedQwenMoe" if is_moe(name) else "GatedQwen"
    return getattr(gated_qwen, family + HEADS.get(name.removeprefix("moe "), "ForCausalLM"))


def save_model(name, folder):
    """Saves one of the models with the package, and beside it what it computes."""
    tiny = tiny_moe_model if is_moe(name) else tiny_model
    fields = CAUSAL_LMS.get(name, {"num_labels": 3} if "Classif" in name else {})
    model = tiny(class_of(name), seed=1, pad_token_id=0, **fields)
    model.save_pretrained(folder / name)
    ids = tokens(2, 9)
    reference = {"ids": ids, "inv_freq": getattr(model, "model", model).rotary_emb.inv_freq}
    with torch.no_grad():
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            reference[implementation] = model(ids)[0]
    if name in CAUSAL_LMS:
        model.set_attn_implementation("eager")
        reference["greedy"] = torch.tensor(greedy(model, ids))
        assert reference["greedy"][:, 9:].unique().numel() > 4, "a repeated token would prove nothing about the cache"
    save_file(reference, folder / f"{name}.safetensors")


def save_ungated_under_gated_config(folder, tiny):
    """Two folders with the same ungated weights, the second under a config that says there are gates."""
    for name, positions in (("ungated_weights", []), ("gates_missing", ["value", "attn_output"])):
        tiny(gate_positions=positions).save_pretrained(folder / name)
    (folder / "gates_missing" / "model.safetensors").write_bytes(
        (folder / "ungated_weights" / "model.safetensors").read_bytes()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the package saved, one folder a model; what version V saved stands in V/."""
    folder = tmp_path_factory.mktemp("versions")
    for name in AUTO_CLASSES:
        save_model(name, folder)
    for tiny in (tiny_model, tiny_moe_model):
        save_ungated_under_gated_config(folder / tiny.__name__, tiny)
    words = {f"w{token}": token for token in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """version -> its process, or the exception that says why it cannot be had."""
    found = {}
    try:
        for version in VERSIONS:
            try:
                path = environment(version)
                work = tmp_path_factory.mktemp(f"transformers-{version}")
                found[version] = FreshProcess(work, path, helpers=(load, greedy, continued))
            except VersionUnavailable as error:
                found[version] = error
        yield found
    finally:
        for process in found.values():
            if isinstance(process, FreshProcess):
                process.close()


def call_everywhere(processes, function, *arguments):
    """Calls the function on every version at once, with `{version}` filled into the arguments.

    Returns version -> result, or the exception instead.
    """
    results = {}
    for version, process in processes.items():
        if isinstance(process, FreshProcess):
            process.start(function, *(str(argument).format(version=version) for argument in arguments))
    for version, process in processes.items():
        try:
            results[version] = process.result() if isinstance(process, FreshProcess) else process
        except AssertionError as error:
            results[version] = error
    return results


def outcome(results, version):
    """The result, once it is known that there is one."""
    result = results[version]
    if isinstance(result, VersionUnavailable):
        if offline():
            pytest.skip(str(result))
        pytest.fail(str(result), pytrace=False)
    if isinstance(result, AssertionError):
        raise result
    return result


def reference(folder, name, key):
    return load_file(folder / f"{name}.safetensors")[key].tolist()


@pytest.fixture(scope="module")
def first(folder, processes):
    """model -> version -> what it measured on what the package saved; version V has saved it again in V/."""
    return {
        name: call_everywhere(
            processes, measure, folder / name, auto_class, folder / f"{name}.safetensors", folder / "{version}" / name
        )
        for name, auto_class in AUTO_CLASSES.items()
    }


@pytest.fixture(scope="module")
def second(folder, processes, first):
    """(model, writer) -> version -> what it measured on what the writer saved."""
    return {
        (name, writer): call_everywhere(
            processes, measure, folder / writer / name, auto_class, folder / f"{name}.safetensors"
        )
        for name, auto_class in AUTO_CLASSES.items()
        for writer, written in first[name].items()
        if isinstance(written, dict)
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_same_numbers_as_the_package(folder, first, name, version):
    found = outcome(first[name], version)
    assert found["module"].startswith("transformers_modules.")
    assert found["inv_freq"] == 0.0
    assert found["eager"] <= tolerance(name)
    assert found["sdpa"] <= tolerance(name)
    assert found["reloaded"] <= tolerance(name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_same_tokens_with_every_cache(folder, first, name, version):
    found = outcome(first[name], version)
    expected = reference(folder, name, "greedy")
    assert found["uncached"] == expected
    assert found["cached"] == expected
    assert found["cached_sdpa"] == expected
    assert found["static"] == expected
    assert found["continued"] < 1e-5


@pytest.mark.parametrize("writer", VERSIONS)
@pytest.mark.parametrize("reader", VERSIONS)
def test_reads_what_every_other_version_saved(folder, first, second, reader, writer):
    for name in AUTO_CLASSES:
        outcome(first[name], writer)
        found = outcome(second[name, writer], reader)
        assert found["eager"] <= tolerance(name) and found["inv_freq"] == 0.0, name
        if name in CAUSAL_LMS:
            assert (name, found["cached"]) == (name, reference(folder, name, "greedy"))


@pytest.mark.parametrize("writer", VERSIONS)
def test_the_package_reads_what_every_version_saved(folder, first, writer):
    for name in AUTO_CLASSES:
        outcome(first[name], writer)
        model = class_of(name).from_pretrained(folder / writer / name, attn_implementation="eager").eval()
        expected = load_file(folder / f"{name}.safetensors")
        with torch.no_grad():
            assert torch.equal(model(expected["ids"])[0], expected["eager"]), name


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_base_and_scaling_survive(folder, first, second, name, version):
    """Both schemas hold the same values on every version, in the file and in the object."""
    found = outcome(first[name], version)
    rope = {"rope_type": "default", "rope_theta": 10000.0, **CAUSAL_LMS.get(name, {}).get("rope_parameters", {})}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    expected = [rope["rope_theta"], None if rope["rope_type"] == "default" else scaling, rope]
    saved = json.loads((folder / version / name / "config.json").read_text())
    assert [saved["rope_theta"], saved["rope_scaling"], saved["rope_parameters"]] == expected
    assert found["rope"] == expected
    for writer in VERSIONS:
        if (name, writer) in second:
            assert outcome(second[name, writer], version)["rope"] == expected


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_the_config_file_keeps_its_fields(folder, first, name, version):
    """Whatever a version adds or leaves out of its own, Qwen3's and the gate's fields and the auto_map stay."""
    outcome(first[name], version)
    original, saved = (json.loads((path / name / "config.json").read_text()) for path in (folder, folder / version))
    written_by_library = {"transformers_version", "dtype", "torch_dtype"}
    kept = {key: value for key, value in original.items() if key not in written_by_library}
    assert {key: saved.get(key) for key in kept} == kept  # transformers 4 leaves out an absent token id, 5 says null
    assert saved.get("dtype", saved.get("torch_dtype")) == "float32"


@pytest.mark.parametrize("version", VERSIONS)
def test_saved_code_is_the_code(folder, first, version):
    for name in AUTO_CLASSES:
        outcome(first[name], version)
        for file in [*FILES, *(MOE_FILES if is_moe(name) else [])]:
            assert (folder / version / name / file).read_bytes() == (folder / name / file).read_bytes()


@pytest.fixture(scope="module")
def starts(folder, processes):
    return {
        tiny: call_everywhere(
            processes, gate_start, folder / tiny / "ungated_weights", folder / tiny / "gates_missing"
        )
        for tiny in ("tiny_model", "tiny_moe_model")
    }


@pytest.mark.parametrize(("tiny", "layers"), [("tiny_model", 2), ("tiny_moe_model", 3)])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_start_of_the_gate_survives(starts, version, tiny, layers):
    """Gates that the checkpoint lacks start as the config says, in a load and in a fresh build.

    The rest is loaded: of a mixture of experts, whose checkpoint stores every expert by itself, the experts too.
    """
    found = outcome(starts[tiny], version)
    count = layers * (16 + 32) * 32  # rows of the value gate and of the output gate; channels
    for way in ("loaded", "built"):
        assert found[f"{way} 0.0"] == [count, 0.0, 0.0]
        assert found[f"{way} 0.5"][0] == count
        assert found[f"{way} 0.5"][1] == pytest.approx(0.5, rel=0.1)
    assert found["rest 0.0"] and found["rest 0.5"]


@pytest.fixture(scope="module")
def losses(folder, processes):
    return call_everywhere(processes, router_losses, folder / "moe", json.dumps(tokens(2, 9).tolist()))


@pytest.mark.parametrize("version", VERSIONS)
def test_router_losses_are_the_same_or_refused(losses, version):
    if version == "5.0.0":  # its router hands out probabilities in place of logits
        assert "router_z_loss_coef=0.0 or upgrade transformers" in outcome(losses, version)
    else:
        assert outcome(losses, version) == pytest.approx(outcome(losses, INSTALLED), rel=1e-5)


@pytest.fixture(scope="module")
def texts(folder, processes):
    return call_everywhere(processes, text_from_pipeline, folder / "headwise_yarn", folder / "tokenizer.json")


@pytest.mark.parametrize("version", VERSIONS)
def test_pipeline_generates_and_does_not_complain(texts, processes, version):
    running, module, text = outcome(texts, version)
    assert running == version
    assert module.startswith("transformers_modules.")
    words = re.findall(r"w\d+", text)  # versions differ in the space between prompt and answer
    assert words[:3] == ["w3", "w1", "w4"] and len(words) == 11
    assert words == re.findall(r"w\d+", outcome(texts, INSTALLED)[2])
    assert "not supported" not in processes[version].output
