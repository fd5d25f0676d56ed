"""PNG charts of result files, drawn where matplotlib (extra `plot`) is importable."""

from pathlib import Path

from bench.common import describe, say
from bench.lab import charts as lab

COLOURS = ("#c0392b", "#2c3e50", "#2980b9", "#27ae60", "#8e44ad", "#f39c12", "#7f8c8d")


def _line(panel, points: list[tuple], name: str, colour: str) -> None:
    if points:
        x, y = zip(*points, strict=True)
        panel.plot(x, y, marker="o", color=colour, label=name)


def _race(result: dict, pyplot) -> None:
    """One panel for each head dim and mask: TFLOP/s over seqlen, a line for each contestant."""
    rows = result["rows"]
    dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure, panels = pyplot.subplots(
        len(masks), len(dims), figsize=(4.2 * len(dims), 3.2 * len(masks)), squeeze=False
    )
    ceiling = result["ceiling_tflops"]["before"]
    for panel_row, causal in zip(panels, masks, strict=True):
        for panel, d in zip(panel_row, dims, strict=True):
            for name, colour in zip(result["contestants"], COLOURS, strict=False):
                points = sorted(
                    (row["seqlen"], row["tflops"])
                    for row in rows
                    if (row["head_dim"], row["causal"], row["contestant"]) == (d, causal, name)
                )
                _line(panel, points, name, colour)
            panel.axhline(ceiling, color="#bbbbbb", linestyle=":", label="matmul")
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set_title(f"d {d}, {'causal' if causal else 'full'}")
            panel.set_xlabel("sequence length")
            panel.set_ylabel("TFLOP/s")
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.suptitle(f"{result['timed']} ({result['arguments']['dtype']})")


def _memory(result: dict, pyplot) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4))
    titles = {"forward": "forward", "training": "forward and backward"}
    for panel, (phase, title) in zip(panels, titles.items(), strict=True):
        for name, colour in zip(result["contestants"], COLOURS, strict=False):
            points = [
                (row["tokens"], row[phase] / 2**20)
                for row in result["rows"]
                if row["contestant"] == name and row[phase] is not None
            ]
            _line(panel, points, name, colour)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(title)
        panel.set_xlabel("tokens")
        panel.set_ylabel("MiB beyond the inputs")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(result["shape"])


def _train_context(result: dict, pyplot) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4))
    axes = {"peak_gib": "peak memory, GiB", "tokens_per_s": "tokens/s"}
    for panel, (key, label) in zip(panels, axes.items(), strict=True):
        for name, colour in zip(result["contestants"], COLOURS, strict=False):
            points = [
                (row["context"], row[key])
                for row in result["rows"]
                if row["attention"] == name and not row["oom"]
            ]
            _line(panel, points, name, colour)
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("context")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(result["shape"])


def _train_curves(result: dict, pyplot) -> None:
    figure, panel = pyplot.subplots(figsize=(8, 4))
    for run, colour in zip(result["rows"], COLOURS, strict=False):
        panel.plot(run["losses"], color=colour, label=run["attention"], linewidth=1)
    panel.set_xlabel("step")
    panel.set_ylabel("training loss, nats per byte")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.suptitle(result["shape"], fontsize=8)


CHARTS = {
    "forward": _race,
    "backward": _race,
    "train_step": _race,
    "memory": _memory,
    "train_context": _train_context,
    "train_curves": _train_curves,
    "ab": lab.draw,
}


def write(result: dict, path: Path) -> None:
    draw = CHARTS.get(result["name"])
    if draw is None or not result["rows"]:
        return
    try:
        import matplotlib
    except ImportError:
        say(f"{path.name} not drawn: matplotlib is not installed (extra `plot`)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        draw(result, pyplot)
        figure = pyplot.gcf()
        figure.text(0.5, 0.005, describe(result["environment"]), ha="center", fontsize=5)
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        figure.savefig(path, dpi=110)
        say(f"wrote {path}")
    except ValueError as error:  # all contestants failed, say: nothing to draw on a log scale
        say(f"{path.name} not drawn: {error}")
    finally:
        pyplot.close("all")
