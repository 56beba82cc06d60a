"""A model card says what the folder and the measurements say: nothing more, nothing else, and in the Hub's format."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from diagnosis_sample import diagnosis_sample
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from publishable import publishable_folder, word_tokenizer
from small_tokenizers import tokenizer_of
from tiny import tiny_config, tiny_model, tiny_moe_model, tokens
from ungated import ungated_folder

from gated_qwen.configuration.accounting import count_parameters
from gated_qwen.configuration.presets import preset_names
from gated_qwen.conversion.checkpoint import CheckpointError
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.extend import extend
from gated_qwen.conversion.source_card import gguf_card, source_card
from gated_qwen.diagnostics.diagnose import diagnose
from gated_qwen.diagnostics.diagnosis import write_diagnoses
from gated_qwen.model_cards import preset_cards
from gated_qwen.model_cards.card import build_card, check_card, write_card
from gated_qwen.model_cards.markdown import escape
from gated_qwen.model_cards.reported import PAPER_SHAPE, VARIANTS

KNOWN = {"license": "apache-2.0", "base_model": "owner/source"}
EVALUATION = {
    "settings": {
        "model": "/home/someone/models/secret",
        "model_type": "gated_qwen",
        "max_position_embeddings": 512,
        "dtype": "float32",
        "seed": 0,
        "text": "prose.txt",
    },
    "environment": {"gated_qwen": "0.1.0", "torch": "2.13.0", "device": "cpu"},
    "cells": [
        {"task": "niah_single", "length": 256, "depth": 0.0, "samples": 5, "score": 100.0},
        {"task": "niah_single", "length": 256, "depth": 1.0, "samples": 5, "score": 40.0},
        {"task": "perplexity", "length": 512, "depth": None, "samples": 2, "nll": 2.0, "perplexity": 7.389056},
    ],
}


@pytest.fixture
def gated(tmp_path):
    """A tiny Llama that was given a headwise gate."""
    convert(ungated_folder(tmp_path / "llama", "llama"), tmp_path / "gated", gate="headwise")
    return tmp_path / "gated"


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def front_matter(text: str) -> dict:
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("\n---\n")[0][4:])


def write_json(path: Path, content) -> Path:
    path.write_text(json.dumps(content))
    return path


def diagnosis_of(folder: Path, path: Path, **model) -> Path:
    """A made-up diagnosis that claims to be of the model in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    content = diagnosis_sample()
    content["model"] |= {"layers": config["num_hidden_layers"], "hidden_size": config["hidden_size"]}
    content["model"] |= {"parameters": parameters_of(folder), **model}
    return write_json(path, content)


def parameters_of(folder: Path) -> int:
    from gated_qwen.conversion.inspection import inspect_checkpoint

    return inspect_checkpoint(folder).parameters


# Front matter


def test_the_front_matter_is_complete_and_holds_nothing_empty(gated):
    data = front_matter(build_card(gated, **KNOWN))
    assert data == {
        "license": "apache-2.0",
        "base_model": "owner/source",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gated-attention", "arxiv:2505.06708"],
    }


def test_the_hubs_own_reader_reads_the_card(gated, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(EVALUATION))
    text = build_card(gated, **KNOWN, evaluations=[tmp_path / "results.json"])
    data = ModelCard(text).data
    assert (data.license, data.base_model, len(data.eval_results)) == ("apache-2.0", "owner/source", 2)


def test_a_chat_template_makes_the_model_conversational(gated):
    (gated / "chat_template.jinja").write_text("{{ messages }}")
    assert "apply_chat_template" not in build_card(gated, **KNOWN)  # no tokenizer to apply it
    word_tokenizer().save_pretrained(gated)
    text = build_card(gated, **KNOWN)
    assert "conversational" in front_matter(text)["tags"]
    assert "apply_chat_template" in text


def test_license_base_model_language_and_datasets_come_from_the_sources_card(gated):
    card = {"license": "mit", "base_model": ["owner/first"], "language": ["en", "no"], "datasets": ["owner/data"]}
    edit_json(gated / "provenance.json", lambda record: record["source"].update(card=card))
    data = front_matter(build_card(gated))
    assert data["license"] == "mit"
    assert data["base_model"] == "owner/first"
    assert data["language"] == ["en", "no"]
    assert data["datasets"] == ["owner/data"]


def test_the_base_model_is_the_repository_that_the_source_came_from(gated):
    edit_json(gated / "provenance.json", lambda record: record["source"].update(name="owner/source"))
    assert front_matter(build_card(gated, license="mit"))["base_model"] == "owner/source"


def test_license_and_base_model_are_known_after_several_conversions(tmp_path):
    source = ungated_folder(tmp_path / "llama", "llama")
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: owner/first\n---\n# Llama\n")
    convert(source, tmp_path / "gated")
    convert(tmp_path / "gated", tmp_path / "again", dtype="bfloat16")
    data = front_matter(build_card(tmp_path / "again"))
    assert (data["license"], data["base_model"]) == ("mit", "owner/first")


@pytest.mark.parametrize("moe", [{}, {"mlp_only_layers": [0]}], ids=str)
def test_a_mixture_of_experts_states_what_a_token_uses(tmp_path, moe):
    model = tiny_moe_model(**moe)
    model.save_pretrained(tmp_path / "moe")
    count = count_parameters(model.config)
    text = build_card(tmp_path / "moe", **KNOWN)
    assert f"| parameters | {count.total:,}, {count.gate:,} of them in gates" in text
    assert f"| of them active for a token | {count.active:,} |" in text


def test_an_unknown_license_is_asked_for(gated):
    with pytest.raises(ValueError, match="license is not known.*--license"):
        build_card(gated, base_model="owner/source")


def test_an_unknown_base_model_is_asked_for_and_never_a_path(gated, tmp_path):
    with pytest.raises(ValueError, match="base model is not known.*--base-model"):
        build_card(gated, license="mit")
    for path in (str(tmp_path), "./llama", "../llama", "llama", "a/b/c", "~/llama"):
        with pytest.raises(ValueError, match="is no repository id"):
            build_card(gated, license="mit", base_model=path)


def test_a_source_that_is_on_no_hub_is_left_out(gated):
    data = front_matter(build_card(gated, license="mit", base_model="none"))
    assert "base_model" not in data and "base_model_relation" not in data


def test_a_fresh_model_has_no_base_model(tmp_path):
    from gated_qwen.conversion.create import create

    text = build_card(create("tiny-headwise", tmp_path / "fresh"), license="mit")
    assert "base_model" not in front_matter(text)
    assert "drawn at random" in text


def record_of_training(source: str | None = None) -> dict:
    record = {
        "verb": "train",
        "recipe": {
            "model": {"preset": "tiny-headwise"},
            "data": {"train": [{"hub": "owner/prose"}, {"text": "a.txt"}]},
        },
        "optimizer_steps": 1200,
        "tokens": 2560,
    }
    return {**record, "source": {"name": source}} if source else record


def test_a_model_trained_from_scratch_has_no_base_model_and_says_how_far_it_was_trained(gated):
    write_json(gated / "provenance.json", record_of_training())
    text = build_card(gated, license="mit")
    assert "base_model" not in front_matter(text) and front_matter(text)["datasets"] == ["owner/prose"]
    assert "1. `train` of the preset `tiny-headwise`, 1,200 optimizer steps, 2,560 tokens" in text
    assert "drawn at random" not in text
    write_json(gated / "provenance.json", record_of_training("llama"))
    with pytest.raises(ValueError, match="base model is not known"):
        build_card(gated, license="mit")


@pytest.mark.parametrize(
    ("head", "pipeline"), [("ForSequenceClassification", "text-classification"), ("Model", "feature-extraction")]
)
def test_a_model_with_another_head_is_loaded_by_its_own_class(tmp_path, head, pipeline):
    import gated_qwen

    folder = publishable_folder(tmp_path / "m", tiny_model(getattr(gated_qwen, f"GatedQwen{head}"), pad_token_id=0))
    text = build_card(folder, license="mit", base_model="none", existing="", replace=True)
    auto_class = "AutoModel" if head == "Model" else f"AutoModel{head}"
    assert front_matter(text)["pipeline_tag"] == pipeline
    assert f"from transformers import {auto_class}, AutoTokenizer" in text
    assert "generate" not in text and "## Serve" not in text and "causal" not in text


def test_a_quantised_model_is_filed_as_such_unless_a_person_says_otherwise(gated):
    edit_json(gated / "config.json", lambda config: config.update(quantization_config={"quant_method": "torchao"}))
    path = write_card(gated, **KNOWN)
    assert front_matter(path.read_text())["base_model_relation"] == "quantized"
    assert "| numbers stored (quantised with torchao) | 19,872" in path.read_text()
    path.write_text(path.read_text().replace("base_model_relation: quantized", "base_model_relation: merge"))
    write_card(gated)
    assert front_matter(path.read_text())["base_model_relation"] == "merge"


def test_the_license_other_needs_a_name(gated):
    with pytest.raises(ValueError, match="license_name"):
        build_card(gated, **{**KNOWN, "license": "other"})
    text = build_card(gated, **{**KNOWN, "license": "other"}, license_name="mine", license_link="LICENSE")
    assert front_matter(text)["license_name"] == "mine"


# What the source's card gives


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_what_goes_along_is_read_from_a_card(tmp_path, end):
    lines = ["---", "license: mit", "language: no", "datasets: owner/data", "tags: [chat]", "widget: []", "---", "# A"]
    (tmp_path / "README.md").write_bytes(end.join(lines).encode())
    assert source_card(tmp_path) == {"license": "mit", "language": ["no"], "datasets": ["owner/data"]}


def test_a_folder_without_a_card_or_front_matter_says_nothing(tmp_path):
    assert source_card(tmp_path) == {}
    (tmp_path / "README.md").write_text("# A model\n\n---\nlicense: mit\n---\n")
    assert source_card(tmp_path) == {}


def test_a_broken_card_is_refused_by_name(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: [mit\n---\n")
    with pytest.raises(CheckpointError, match="README.md: the front matter is not valid YAML"):
        source_card(tmp_path)


def test_a_gguf_file_gives_license_language_and_base_model(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_base_model_count(1)
    writer.add_base_model_repo_url(0, "https://huggingface.co/owner/source")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = gguf_card(tmp_path / "m.gguf")
    assert found == {"license": "apache-2.0", "language": ["en"], "base_model": ["owner/source"]}


# Body


def test_the_recipe_stands_in_the_card_word_for_word(gated):
    text = build_card(gated, **KNOWN)
    block = text.split("```json\n")[1].split("\n```")[0]
    assert json.loads(block) == json.loads((gated / "provenance.json").read_text())


def test_the_card_says_what_the_gate_is_and_counts_it(gated):
    text = build_card(gated, **KNOWN)
    assert "before `o_proj` (G1)" in text and "one score for each head" in text
    assert "19,872, 256 of them in gates (1.29 %)" in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gate_input_channels": 8}, "X the first 8 channels of the normalised hidden state"),
        ({"gate_input": "constant"}, "`Y' = Y * sigmoid(b)`, one score for each coordinate; Y is what is gated, b a"),
        ({"attn_output_norm": True}, "| added to attention | RMSNorm on each head's attention output |"),
    ],
)
def test_the_card_says_what_this_gate_reads_and_scores(tmp_path, fields, words):
    tiny_model(**fields).save_pretrained(tmp_path / "m")
    assert words in build_card(tmp_path / "m", license="mit", base_model="none")


def test_the_code_of_the_card_runs_without_a_tokenizer(gated, capsys):
    text = build_card(gated, **KNOWN)
    assert "There is no tokenizer" in text and "AutoTokenizer" not in text and "## Serve" not in text
    code = text.split("```python\n")[1].split("```")[0].replace("OWNER/gated", str(gated))
    exec(code.replace("max_new_tokens=64", "max_new_tokens=2, pad_token_id=0"), {})
    assert capsys.readouterr().out.startswith("tensor([ 1,  2,  3, ")


def test_a_retrofit_promises_no_gain(gated):
    assert "brought no clear gain" in " ".join(build_card(gated, **KNOWN).split())


def test_an_extended_context_and_its_price_on_short_text_are_stated(gated, tmp_path):
    extend(gated, tmp_path / "long", factor=4.0)
    text = " ".join(build_card(tmp_path / "long", **KNOWN).split())
    assert "512 tokens and extended to 2,048 with static YaRN: factor 4" in text
    assert "Static YaRN acts on every text, short ones too" in text
    assert "on short text was not measured here" in text
    assert "2 for 1,024 tokens, 4 for 2,048 tokens" in text
    assert "1. `convert`" in text and "2. `extend`" in text


def test_a_changed_base_is_stated(gated, tmp_path):
    extend(gated, tmp_path / "moved", rope_theta=1e6)
    assert "from 10,000 to 1,000,000" in build_card(tmp_path / "moved", **KNOWN)


def test_no_scaling_is_not_called_yarn(gated):
    assert "YaRN" not in build_card(gated, **KNOWN)


@pytest.mark.parametrize("to", ["official", "qwen3_next", "qwen3_5"])
def test_exports_have_cards_too(tmp_path, to):
    tiny_model().save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "export", to=to)
    text = build_card(tmp_path / "export", **KNOWN)
    assert "trust_remote_code" not in text
    assert ("does not load" in text) == (to == "official")


# Measurements


def test_nothing_is_said_of_what_was_not_measured(gated):
    text = build_card(gated, **KNOWN)
    assert "## Measured" not in text and "model-index" not in text
    assert "Nothing was measured on this model" in text


def test_a_diagnosis_becomes_a_table_and_numbers_with_named_data(gated, tmp_path):
    path = diagnosis_of(gated, tmp_path / "diagnosis.json")
    content = json.loads(path.read_text())
    text = build_card(gated, **KNOWN, diagnosis=path)
    name, results = model_index_to_eval_results(front_matter(text)["model-index"])
    assert name == "gated"
    values = {result.metric_type: result for result in results}
    share = values["first_token_attention_share"]
    assert share.metric_value == pytest.approx(content["attention"]["mean"]["first_token_share"], abs=1e-6)
    assert share.dataset_name == "jargon.txt"
    assert share.dataset_args["length"] == 4096 and share.dataset_args["measured"] == "2026-11-30"
    assert values["mean_gate_attn_output"].metric_value == pytest.approx(
        content["gates"]["summary"]["attn_output"]["mean"], abs=1e-6
    )
    assert "2 texts of 4,096 tokens" in text and "2026-11-30" in text and "torch 2.13.0" in text


def test_an_evaluation_becomes_a_table_and_numbers_with_named_data(gated, tmp_path):
    text = build_card(gated, **KNOWN, evaluations=[write_json(tmp_path / "e.json", EVALUATION)])
    _, (score, perplexity) = model_index_to_eval_results(front_matter(text)["model-index"])
    assert (score.metric_value, score.dataset_args["samples"]) == (70.0, 10)
    assert score.dataset_name == "niah_single (synthetic, RULER's rules), 256 tokens, in prose.txt"
    assert (perplexity.metric_type, perplexity.metric_value) == ("perplexity", 7.389056)
    assert "| `niah_single` | 256 | 10 | 70 |" in text
    assert "secret" not in text  # the folder's name on this machine is nobody's business


def test_results_at_several_lengths_keep_their_own_length_and_samples(gated, tmp_path):
    cells = [
        {"task": task, "length": length, "depth": None, "samples": length // 128, "score": 1.0, "perplexity": 2.0}
        for task in ("niah_single", "perplexity")
        for length in (128, 256, 512)
    ]
    path = write_json(tmp_path / "e.json", {**EVALUATION, "cells": cells})
    text = build_card(gated, **KNOWN, evaluations=[path], diagnosis=diagnosis_of(gated, tmp_path / "d.json"))
    _, results = model_index_to_eval_results(front_matter(text)["model-index"])
    found = [(r.metric_type, r.dataset_args["length"], r.dataset_args.get("samples")) for r in results]
    assert sorted(found[-6:]) == [(kind, n, n // 128) for kind in ("perplexity", "score") for n in (128, 256, 512)]
    assert {length for _, length, _ in found[:-6]} == {4096}


@pytest.mark.parametrize(("field", "value"), [("layers", 9), ("parameters", 1), ("model_type", "llama")])
def test_a_diagnosis_of_another_model_is_refused(gated, tmp_path, field, value):
    path = diagnosis_of(gated, tmp_path / "diagnosis.json", **{field: value})
    with pytest.raises(ValueError, match=f"diagnosis.json: {field} of the model"):
        build_card(gated, **KNOWN, diagnosis=path)


@pytest.mark.parametrize(
    ("field", "value"), [("max_position_embeddings", 2048), ("model_type", "llama"), ("rope_theta", 5e5)]
)
def test_an_evaluation_of_another_model_is_refused(gated, tmp_path, field, value):
    settings = {**EVALUATION["settings"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    assert build_card(
        gated, **KNOWN, evaluations=[write_json(tmp_path / "e.json", {**EVALUATION, "settings": settings})]
    )
    (settings["rope_parameters"] if field == "rope_theta" else settings)[field] = value
    content = {**EVALUATION, "settings": settings}
    with pytest.raises(ValueError, match=f"e.json: {field} of the model"):
        build_card(gated, **KNOWN, evaluations=[write_json(tmp_path / "e.json", content)])


def test_a_cell_without_a_number_is_refused(gated, tmp_path):
    content = {**EVALUATION, "cells": [{**EVALUATION["cells"][0], "score": None}]}
    with pytest.raises(ValueError, match="e.json: a cell lacks a number"):
        build_card(gated, **KNOWN, evaluations=[write_json(tmp_path / "e.json", content)])


# The person's own text


def test_own_text_and_own_metadata_survive_a_rebuild(gated):
    path = write_card(gated, **KNOWN)
    text = path.read_text().replace("---\n\n<!--", "thumbnail: cat.png\n---\n\nMine, above.\n\n<!--", 1)
    path.write_text(text + "\n## Mine, below\n\nText.\n")
    write_card(gated)  # license and base model are known from the card
    again = path.read_text()
    assert "Mine, above." in again and "## Mine, below\n\nText.\n" in again
    assert front_matter(again)["thumbnail"] == "cat.png"
    assert front_matter(again)["base_model"] == "owner/source"
    write_card(gated)
    assert path.read_text() == again


def test_metadata_that_a_person_changed_stays(gated):
    path = write_card(gated, **KNOWN)
    path.write_text(
        path.read_text().replace("license: apache-2.0", "license: mit").replace("- gated-a", "- mine\n- gated-a")
    )
    write_card(gated)
    data = front_matter(path.read_text())
    assert data["license"] == "mit" and "mine" in data["tags"]


def test_results_of_others_survive_a_rebuild_and_ours_are_measured_anew(gated, tmp_path):
    path = write_card(gated, **KNOWN, evaluations=[write_json(tmp_path / "e.json", EVALUATION)])
    text = path.read_text()
    other = "- task:\n      type: text-generation\n    dataset:\n      type: mmlu\n      name: MMLU\n    metrics:\n"
    other += "    - type: accuracy\n      value: 0.5\n  "
    path.write_text(text.replace("- task:\n", other + "- task:\n", 1))
    write_card(gated)
    _, results = model_index_to_eval_results(front_matter(path.read_text())["model-index"])
    assert [(result.dataset_name, result.metric_value) for result in results] == [("MMLU", 0.5)]


def test_a_card_of_another_hand_is_not_overwritten_without_consent(gated):
    (gated / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    with pytest.raises(ValueError, match="not written by gated-qwen card.*--replace"):
        write_card(gated, **KNOWN)
    assert (gated / "README.md").read_text() == "---\nlicense: mit\n---\n# Mine\n"
    write_card(gated, **KNOWN, replace=True)
    assert "# Mine" not in (gated / "README.md").read_text()


def test_a_generated_part_that_was_edited_is_not_overwritten_without_consent(gated):
    path = write_card(gated, **KNOWN)
    path.write_text(path.read_text().replace("## Limits\n", "## Limits\n\nMine.\n"))
    with pytest.raises(ValueError, match="changed by hand"):
        write_card(gated)
    assert "Mine." in path.read_text()
    write_card(gated, replace=True)
    assert "Mine." not in path.read_text()


def test_a_refused_card_leaves_no_file(gated):
    with pytest.raises(ValueError):
        write_card(gated)
    assert not list(gated.glob("*README*"))


def test_a_card_is_not_written_through_a_link(gated, tmp_path):
    (tmp_path / "elsewhere.md").write_text("")
    (gated / "README.md").symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(ValueError, match="is a link"):
        write_card(gated, **KNOWN)


# Hostile values


HOSTILE = (
    "x\n---\nlicense: mit\n<script>alert(1)</script> | [a](http://b) ![c](d) `e` <!-- gated-qwen card: end --> {{ 1 }}"
)


def test_values_from_files_cannot_write_markdown_html_or_yaml(gated):
    def change(record):
        record["source"]["name"] = HOSTILE
        record["versions"] = {HOSTILE: HOSTILE}
        record["steps"] = [{"verb": HOSTILE, "created": HOSTILE, "source": {"name": HOSTILE}}]

    edit_json(gated / "provenance.json", change)
    write_card(gated, **KNOWN)
    text = write_card(gated).read_text()  # the marks are still found
    assert front_matter(text)["license"] == "apache-2.0"
    outside = text.split("```json")[0] + text.split("```\n\n</details>")[1]
    assert "<script>" not in outside and "](http://b)" not in outside and "![c]" not in outside
    assert text.count("<!-- gated-qwen card: end -->") == 1
    block = text.split("```json\n")[1].split("\n```")[0]
    assert json.loads(block)["source"]["name"] == HOSTILE


def test_the_folders_name_cannot_write_code(gated, tmp_path):
    folder = tmp_path / 'x"; import os; "'
    shutil.copytree(gated, folder)
    assert 'name = "OWNER/x-import-os"' in build_card(folder, **KNOWN)


@pytest.mark.parametrize("value", ["a|b", "*a*", "_a_", "[a](b)", "<b>", "# a", "a\n\n# b", "`", "&lt;", "http://a.b"])
def test_escaped_text_is_shown_as_it_is(value):
    text = escape(value)
    assert "\n" not in text and "<" not in text and "://" not in text
    assert not any(char in "|*_[]#`" and (i == 0 or text[i - 1] != "\\") for i, char in enumerate(text) if char != "#")


@pytest.mark.parametrize(
    "record", [[], "x", {"source": "x"}, {"steps": 5}, {"gate": "x", "verb": "convert"}, {"verb": 3}]
)
def test_a_record_of_any_shape_does_not_break_the_card(gated, record):
    write_json(gated / "provenance.json", record)
    if isinstance(record, dict):
        build_card(gated, **KNOWN)
    else:
        with pytest.raises(ValueError, match="provenance.json"):
            build_card(gated, **KNOWN)


PATHS = {
    "/home/someone/data.jsonl": ".../data.jsonl",
    "~/models/llama": ".../llama",
    "~/llama": ".../llama",
    "file:///x": ".../x",
    r"\\server\share\x": ".../x",
    "file:///srv/share/x": ".../x",
    r"C:\Users\me\x.txt": ".../x.txt",
    "from /data/corpus/a.txt, then b": "from .../a.txt, then b",
    "https://huggingface.co/owner/name": "https://huggingface.co/owner/name",
    "owner/name": "owner/name",
    "and/or 1/2": "and/or 1/2",
}


@pytest.mark.parametrize("text", PATHS)
def test_paths_of_this_machine_are_cut_to_their_last_part(gated, text):
    edit_json(gated / "provenance.json", lambda record: record.update(recipe={"data": [text]}))
    block = build_card(gated, **KNOWN).split("```json\n")[1].split("\n```")[0]
    assert json.loads(block)["recipe"]["data"] == [PATHS[text]]


def test_the_text_of_a_diagnosis_is_named_without_its_folder(gated, tmp_path):
    path = diagnosis_of(gated, tmp_path / "diagnosis.json")
    edit_json(path, lambda content: content["input"].update(text="/home/someone/private/prose.txt"))
    text = build_card(gated, **KNOWN, diagnosis=path)
    assert "private" not in text and "prose.txt" in text


def test_a_path_that_someone_wrote_into_the_generated_part_is_refused(gated):
    text = build_card(gated, **KNOWN)
    with pytest.raises(ValueError, match="path of this machine"):
        check_card(text.replace("## Limits", "## Limits\n\nSee /home/someone/notes.", 1))


# check_card


@pytest.fixture
def card(gated):
    return build_card(gated, **KNOWN)


BAD = {
    "license is missing": ("license: apache-2.0\n", ""),
    "library_name is missing": ("library_name: transformers\n", ""),
    "tags is empty": ("tags:\n- gated-attention\n- arxiv:2505.06708\n", "tags: []\n"),
    r"tags\[2\] is empty": ("- arxiv:2505.06708\n", "- arxiv:2505.06708\n- null\n"),
    r"tags holds 5, which is no text": ("- arxiv:2505.06708\n", "- 5\n"),
    "base_model 'owner/source.git' is no repository id": ("owner/source", "owner/source.git"),
    "datasets is empty": ("license: ", "datasets:\nlicense: "),
    "license 'Apache 2' is no identifier": ("apache-2.0", "Apache 2"),
    "base_model is a path of this machine": ("owner/source", "/home/me/llama"),
    "base_model './llama' is no repository id": ("owner/source", "./llama"),
    "base_model 'models/llama/hf' is no repository id": ("owner/source", "models/llama/hf"),
    "base_model_relation is 'child'": ("finetune", "child"),
    "language False is no language code": ("license: ", "language: no\nlicense: "),
    "not valid YAML": ("license: ", "license: ["),
    "no front matter": ("---\n", ""),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_card_is_refused_with_the_field(card, message):
    old, new = BAD[message]
    with pytest.raises(ValueError, match=message):
        check_card(card.replace(old, new, 1))


def test_aliases_of_yaml_cannot_make_a_check_endless(card):
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
    check_card(card.replace("license:", f"{bomb}itself: &i [*i]\nlicense:", 1))


RESULT = """model-index:
- name: m
  results:
  - task: {type: text-generation}
    dataset: {type: text, name: prose}
    metrics:
    - {type: perplexity, value: 7.5}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("7.5", "'7.5'", "a metric's value is a number"),
        ("7.5", "true", "a metric's value is a number"),
        ("7.5", ".nan", "a metric's value is a number"),
        (", name: prose", "", "KeyError: 'name'"),
        ("name: prose", "name: 5", "dataset_name is 5"),
        ("name: prose", "name: ''", "is empty"),
    ],
)
def test_results_are_numbers_with_named_data(card, old, new, message):
    good = card.replace("license:", RESULT + "license:", 1)
    check_card(good)
    with pytest.raises(ValueError, match=message):
        check_card(good.replace(old, new, 1))


def test_a_card_that_is_silent_on_static_yarn_is_refused(gated, tmp_path):
    extend(gated, tmp_path / "long", factor=4.0)
    silent = "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [a]\n---\n# Mine\n"
    check_card(silent, gated)
    with pytest.raises(ValueError, match="static YaRN"):
        check_card(silent, tmp_path / "long")


def test_a_card_of_an_older_config_is_refused(gated):
    text = write_card(gated, **KNOWN).read_text()
    check_card(text, gated)
    extend(gated, in_place=True, factor=2.0)
    with pytest.raises(ValueError, match="made for another config.json"):
        check_card(text, gated)
    write_card(gated)
    check_card((gated / "README.md").read_text(), gated)


# Presets and variants


def test_the_cards_of_presets_and_variants_are_what_the_code_makes():
    """`python -m gated_qwen.model_cards.preset_cards` writes them anew."""
    folder = Path(preset_cards.__file__).parent
    cards = preset_cards.reference_cards()
    there = {
        str(path.relative_to(folder)) for kind in ("presets", "variants") for path in (folder / kind).glob("*.md")
    }
    assert there == set(cards)
    for name, text in cards.items():
        assert (folder / name).read_text() == text, name


def test_every_preset_and_variant_has_a_card_that_passes():
    cards = preset_cards.reference_cards()
    assert {f"presets/{name}.md" for name in preset_names()} | {f"variants/{name}.md" for name in VARIANTS} == set(
        cards
    )
    for text in cards.values():
        check_card(text)
        assert "nothing here was measured" in text


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.gate_parameters])
def test_the_reported_size_of_a_gate_is_the_counted_one(name):
    config = tiny_config(**PAPER_SHAPE, **VARIANTS[name].fields)
    assert count_parameters(config).gate == VARIANTS[name].gate_parameters


# The command


def test_the_command_writes_checks_and_refuses(gated, tmp_path, run_command):
    code, out, err = run_command("card", gated)
    assert (code, out) == (1, "") and "--license" in err and len(err.splitlines()) == 1
    options = ["--license", "mit", "--base-model", "owner/source", "--dataset", "owner/data"]
    code, out, err = run_command("card", gated, *options, "--json")
    assert code == 0 and json.loads(out) == {"card": str(gated / "README.md"), "checked": True, "written": True}
    assert front_matter((gated / "README.md").read_text())["datasets"] == ["owner/data"]
    assert run_command("card", gated, "--check")[0] == 0
    (gated / "README.md").write_text("# Mine\n")
    code, _, err = run_command("card", gated, "--check")
    assert code == 1 and "no front matter" in err
    assert run_command("card", gated, *options, "--out", tmp_path / "card.md")[0] == 0
    assert (gated / "README.md").read_text() == "# Mine\n"


@pytest.mark.parametrize("build", [tiny_model, tiny_moe_model])
def test_a_real_diagnosis_and_its_card(tmp_path, build):
    model = build()
    model.save_pretrained(tmp_path / "model")
    source = {"text": "prose.txt", "sha256": "0" * 64, "first_token": "none", "offset": 0}
    diagnosis = diagnose(model, tokens(2, 96), name="m", source=source)
    write_diagnoses(tmp_path / "d.json", [diagnosis])
    text = build_card(tmp_path / "model", **KNOWN, diagnosis=tmp_path / "d.json")
    _, results = model_index_to_eval_results(front_matter(text)["model-index"])
    shares = {result.metric_type: result.metric_value for result in results}
    assert shares["first_token_attention_share"] == pytest.approx(
        diagnosis["attention"]["mean"]["first_token_share"], abs=1e-6
    )
    if build is tiny_model:
        assert "### Attention, activations and gates\n" in text and "expert" not in text
    else:
        assert "### Attention, activations, gates and routers\n" in text
        most = diagnosis["routers"]["summary"]["max_load"]
        shown = text.split(f"| fullest expert's load over an even one (layer {most['layer']}) | ")[1].split(" |")[0]
        assert float(shown) == pytest.approx(most["value"], rel=1e-2)


@pytest.mark.slow
def test_a_real_evaluation_and_its_card(gated, tmp_path, run_command):
    model = tiny_model(vocab_size=400)
    model.save_pretrained(tmp_path / "model")
    tokenizer_of("byte-level BPE").save_pretrained(tmp_path / "model")
    (tmp_path / "prose.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    arguments = ["--tasks", "perplexity", "--lengths", "128", "--samples", "1", "--text", tmp_path / "prose.txt"]
    assert run_command("evaluate", tmp_path / "model", *arguments, "--out", tmp_path / "e.json")[0] == 0
    code, _, err = run_command(
        *("card", tmp_path / "model", "--license", "mit", "--base-model", "none", "--perplexity", tmp_path / "e.json")
    )
    assert code == 0, err
    data = front_matter((tmp_path / "model" / "README.md").read_text())
    _, (result,) = model_index_to_eval_results(data["model-index"])
    measured = json.loads((tmp_path / "e.json").read_text())["cells"][0]["perplexity"]
    assert result.metric_value == pytest.approx(measured, abs=1e-5)
    assert result.dataset_name == "prose.txt" and result.dataset_args["length"] == 128
