"""The figures by which models are compared, as the terminal and the report show them."""

from gated_qwen.diagnostics.diagnosis import Diagnosis
from gated_qwen.diagnostics.report_html import NOTHING, amount, percent, times


def headline(diagnosis: Diagnosis) -> dict[str, str]:
    """Names and texts of the main results.

    The names are the same for every model, so that they make a table; a mixture of experts has two more.

    Args:
        diagnosis: as `diagnose` returns it.
    """
    attention, activations, gates = (diagnosis[name] for name in ("attention", "activations", "gates"))
    mean, worst = attention["mean"], attention["worst_layer"]
    residual = activations["summary"]["residual"]
    found = {
        "tokens": f"{diagnosis['input']['sequences']:,} × {diagnosis['input']['length']:,}",
        "first-token share (F-Attn)": percent(mean["first_token_share"]),
        "uniform attention would give": percent(mean["uniform"]),
        "boost over uniform": times(mean["boost"]),
        f"without the first {attention['skip_queries']} queries": percent(mean["first_token_share_skipped"]),
        "worst layer": f"{percent(worst['first_token_share'])} (layer {worst['layer']})" if worst else NOTHING,
        f"share of the first {attention['head_keys']} keys": percent(mean["head_share"]),
        "largest residual activation": f"{amount(residual['max_over_layers'])} (index {residual['max_index']})",
        "mean of residual layer maxima": amount(residual["mean_of_layer_maxima"]),
        "largest attention / FFN output": " / ".join(
            amount(activations["summary"][kind]["max_over_layers"]) for kind in ("attention_output", "ffn_output")
        ),
    }
    summary = gates["summary"] if gates else {}
    found["mean gate"] = _by_position(summary, "mean") or NOTHING
    found["dead / always-open heads"] = (
        ", ".join(f"{entry['dead_heads']} / {entry['always_open_heads']}" for entry in summary.values()) or NOTHING
    )
    if diagnosis["routers"]:
        routers = diagnosis["routers"]["summary"]
        most = routers["max_load"]
        found["fullest expert over an even load"] = f"{times(most['value'])} (layer {most['layer']})"
        found["unused experts"] = f"{routers['unused_experts']:,}"
    return found


def _by_position(summary: dict[str, dict[str, float | None]], name: str) -> str:
    if len(summary) == 1:
        return amount(next(iter(summary.values()))[name])
    return ", ".join(f"{position} {amount(entry[name])}" for position, entry in summary.items())
