"""The README's first claims, each from the saved results of what it claims."""

from __future__ import annotations

from typing import Any

from cifar10_tables import NETWORKS, PUBLISHED, accuracy_of, dense_stage_of, removed_of, runs_of

Result = dict[str, Any] | None
SHOWN = ("resnet56", "medium")


def glance(coverage: Result, beside: Result, cifar10: Result, speed: Result) -> str:
    """One line for each thing that a reader wants to know first; what was not measured is not claimed."""
    claims = [
        coverage and _exact(coverage),
        beside and _any_network(beside),
        "**The size you ask for.** In MACs, parameters or bytes it is the most that is left, and a run ends at "
        "most a point below; in milliseconds the network is timed and brought as near as it comes "
        "([docs/targets.md](docs/targets.md)).",
        cifar10 and _accuracy(cifar10),
        speed and _time(speed),
    ]
    return "\n".join(f"- {claim}" for claim in claims if claim)


def _exact(result: dict[str, Any]) -> str:
    told = result["summary"]
    return (
        "**Exact.** The small network gives what the original gives with the removed filters switched off, to "
        f"{told['worst_error']:.0e} in float64, on {told['pass']} of the {told['models']} networks of torchvision "
        "and timm that were tried ([docs/compatibility.md](docs/compatibility.md))."
    )


def _any_network(result: dict[str, Any]) -> str:
    told = result["summary"]
    return (
        "**Any CNN.** Layers of one residual stage may keep different filters, and whole branches may go. Of "
        f"{told['models']} networks put through both tools, {told['ours']} come out working here and "
        f"{told['theirs']} of Torch-Pruning 1.6.1."
    )


def _accuracy(result: dict[str, Any]) -> str:
    network, ratio = SHOWN
    runs = runs_of(result["runs"], f"cifar10-{network}-best-{ratio}")
    if not runs:
        return ""
    paper = PUBLISHED[network, ratio][0].accuracy
    ours, dense = (told.partition(" (")[0] for told in (accuracy_of(runs), dense_stage_of(runs)))
    plain = runs_of(result["runs"], f"cifar10-{network}-paper-{ratio}")
    aside = f"; the paper's own settings give {accuracy_of(plain).partition(' (')[0]} here" if plain else ""
    return (
        f"**Half of {NETWORKS[network]} gone on CIFAR-10** ({removed_of(runs, 'left')} % of parameters / MACs): "
        f"{ours} % after the last epoch, {len(runs)} seeds, with longer dense training, distillation and more "
        f"regularisation than in the paper. Its own dense stage had {dense}. The paper reports {paper}{aside} "
        "([below](#cifar-10-beside-the-paper))."
    )


def _time(result: dict[str, Any]) -> str:
    parts = []
    for found in result["networks"].values():
        ratios = [record["speedup"]["median"] for record in found["measured"]]
        name = found["subject"]["name"].partition(",")[0]
        parts.append(
            f"{name} with {found['subject']['fewer_macs']:.1f} times fewer MACs runs {min(ratios):.1f} to "
            f"{max(ratios):.1f} times as fast"
        )
    return f"**Time is measured, not promised.** On a CPU {', '.join(parts)} ([below](#what-it-is-worth-in-time))."
