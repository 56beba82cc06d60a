"""`gated-qwen serve`: transformers' own server, told of our model classes."""

from typing import Annotated

import typer

from gated_qwen.cli import console

# For `app.command`: what is not ours goes on to `transformers serve` as it stands.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    path: Annotated[str, typer.Argument(help="A model folder or a Hub repository id.")],
) -> None:
    """Serve a model with `transformers serve`; every other option is passed on to it, e.g. --port 8000.

    `transformers serve` itself looks for a model's class in transformers and nowhere else, with --trust-remote-code
    too, so it finds no class of ours.
    """
    import gated_qwen
    from gated_qwen.evaluation.loading import check_folder

    check_folder(path)
    try:
        import transformers
        from transformers.cli.transformers import app
    except ImportError as error:
        raise RuntimeError(f"the server is not there ({error}); pip install 'transformers[serving]'") from error
    gated_qwen.register_auto_classes()
    for name in gated_qwen.__all__:
        found = getattr(gated_qwen, name)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            setattr(transformers, name, found)
    _warn_without_chat_template(path)
    app(["serve", path, *context.args], prog_name="gated-qwen")


def _warn_without_chat_template(path: str) -> None:
    """Says before the first question what the server would answer with an error 500 and no reason."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):  # the server says what is wrong with it
        return
    if tokenizer.chat_template is None:
        console.note(
            f"{path}: the tokenizer has no chat template, so /v1/chat/completions will fail; set "
            "tokenizer.chat_template and save it, or ask /v1/completions"
        )
