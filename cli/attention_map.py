"""`gated-qwen attention-map`: the attention weights of a short prompt as a picture."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gated_qwen.cli import console
from gated_qwen.cli.diagnose import check_new, whole_numbers

SHOWN_LAYERS = 4  # evenly spaced ones, unless --layers says which


def attention_map(
    path: Annotated[str, typer.Argument(help="A model folder, a GGUF file or a Hub repository id.")],
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")],
    prompt: Annotated[str | None, typer.Option(help="The text itself.")] = None,
    text: Annotated[Path | None, typer.Option(help="Or a UTF-8 file; its first --length tokens are read.")] = None,
    length: Annotated[int, typer.Option(help="With --text: how many tokens.")] = 128,
    offset: Annotated[int, typer.Option(help="With --text: tokens to leave out first.")] = 0,
    layers: Annotated[
        str | None, typer.Option(help="Layers with commas between them, or all; default: four, evenly spaced.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads with commas between them; default: the mean over heads.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto (that of the weights), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="As torch names it; else the first GPU, or the CPU.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model of another family brings.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Draw where the queries of a short prompt look, layer by layer."""
    if (prompt is None) == (text is None):
        raise typer.BadParameter("say what to read: --prompt TEXT or --text FILE")
    chosen_layers = None if layers in (None, "all") else whole_numbers("--layers", str(layers))
    chosen_heads = None if heads is None else whole_numbers("--heads", heads)
    from gated_qwen.configuration.picture import check_plot

    check_plot(out)
    check_new(out, overwrite=overwrite)
    console.quiet_libraries()
    from gated_qwen.cli.loading import display_name, loaded_model
    from gated_qwen.diagnostics.attention_map import attention_maps, draw_attention_maps
    from gated_qwen.diagnostics.text_sequences import read_sequences

    with loaded_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code) as (model, tokenizer):
        if text is not None:
            ids = read_sequences(text, tokenizer, length=length, offset=offset).input_ids[0]
        else:
            ids = tokenizer(prompt, verbose=False)["input_ids"]
        maps = attention_maps(model, ids, chosen_layers)
    if layers is None:
        maps = _evenly_spaced(maps)
    tokens = [tokenizer.decode([token]) for token in ids]
    draw_attention_maps(maps, tokens, out, display_name(path), chosen_heads)
    print(f"{out}: {len(ids)} tokens, layers {', '.join(map(str, sorted(maps)))}")


def _evenly_spaced(maps: dict[int, Any]) -> dict[int, Any]:
    layers = sorted(maps)
    count = min(SHOWN_LAYERS, len(layers))
    places = [round(i * (len(layers) - 1) / max(count - 1, 1)) for i in range(count)]
    return {layers[place]: maps[layers[place]] for place in places}
