"""The tables, summaries and bars of bench.tables, on invented rows."""

import argparse

import pytest

from bench import tables

SPECIMEN = {"batch": 2, "heads": 4, "heads_kv": 4, "head_dim": 64, "dtype": "bf16"}


def row(contestant: str, seqlen: int, us: float, causal: bool = False) -> dict:
    return {
        **SPECIMEN,
        "seqlen": seqlen,
        "causal": causal,
        "contestant": contestant,
        "us": us,
        "tflops": 1000 / us,
        "percent_of_ceiling": 50.0,
        "spread": 0.01,
        "samples": 30,
        "late": False,
    }


def test_table_prints_shape_time_speed_ceiling_and_ratios():
    names = ["flash_cuda", "sdpa-flash", "fa3"]
    line = tables.race_row(
        "d64", [row("flash_cuda", 512, 10.0), row("sdpa-flash", 512, 12.5)], names
    )
    assert line == "| d64 | 10.0 | 100 | 50 | 1.25x sdpa-flash | 1.25x (80) | - |"
    header = "| shape | flash_cuda us | TFLOP/s | % of matmul | x best peer | x sdpa-flash (its"
    assert tables.race_header(names).startswith(header)
    without_ours = tables.race_row("d64", [row("fa3", 512, 10.0)], names)
    assert without_ours == "| d64 | - | - | - | - | - | - (100) |"
    one_peer = ["flash_cuda", "sdpa-flash", "ours:fp16"]
    assert "best peer" not in tables.race_header(one_peer)


def test_summary_gives_geometric_mean_and_least_cell():
    rows = [
        row("flash_cuda", 512, 10.0),
        row("sdpa-flash", 512, 20.0),
        row("flash_cuda", 1024, 10.0),
        row("sdpa-flash", 1024, 5.0),
        row("flash_cuda", 4096, 10.0),  # the peer failed here: not counted
    ]
    summary = tables.summarize(rows, ["flash_cuda", "sdpa-flash", "fa3"])
    assert set(summary) == {"sdpa-flash", "best"}
    assert summary["sdpa-flash"] == {
        "geometric_mean": 1.0,
        "min": 0.5,
        "min_cell": "d64 full s1024 b2 h4",
        "max": 2.0,
        "max_cell": "d64 full s512 b2 h4",
        "cells": 2,
    }
    assert "geometric mean 1.000x" in tables.summary_text(summary, "flash_cuda")
    assert tables.check_bar(summary, "sdpa-flash:0.9:0.5") == 0
    assert tables.check_bar(summary, "sdpa-flash:1.05:0.5") == 1
    assert tables.check_bar(summary, "ours:fp16:1.0:0.5") == 1  # ran no cell


def test_the_best_peer_is_chosen_cell_by_cell():
    names = ["flash_cuda", "sdpa-cudnn", "fa3", "ours:fp16"]
    rows = [
        *(row("flash_cuda", 512, 10.0), row("sdpa-cudnn", 512, 9.0), row("fa3", 512, 16.0)),
        row("ours:fp16", 512, 5.0),  # no peer
        *(row("flash_cuda", 1024, 10.0), row("fa3", 1024, 12.0)),
    ]
    summary = tables.summarize(rows, names)
    best = summary["best"]
    assert best["of"] == ["sdpa-cudnn", "fa3"] and best["cells"] == 2 and best["untimed"] == 1
    assert best["geometric_mean"] == round((0.9 * 1.2) ** 0.5, 4)
    assert (best["min"], best["max"]) == (0.9, 1.2)
    assert best["below"] == ["d64 full s512 b2 h4 0.900x sdpa-cudnn"]
    said = tables.summary_text(summary, "flash_cuda")
    assert "against the best of sdpa-cudnn, fa3 in each cell: geometric mean 1.039x" in said
    assert "1 timings of peers are missing" in said and "greatest 0.500x" in said
    assert tables.check_bar(summary, "best:1.00:0.9") == 0
    assert tables.check_bar(summary, "best:1.00:0.97") == 1
    assert tables.check_bar(summary, "ours:fp16:0.4:0.4:0.6") == 0
    assert tables.check_bar(summary, "ours:fp16:0.4:0.4:0.45") == 1


def test_a_bar_that_cannot_be_read_is_refused_before_the_run():
    assert tables.parse_bar("ours:v2:1.0:0.9") == ("ours:v2", [1.0, 0.9])
    assert tables.parse_bar("ours:fp16:1:0.97:1.03") == ("ours:fp16", [1.0, 0.97, 1.03])
    for text in ("fa3", "fa3:1.0", "1.0:0.9", "fa3:1.0:x"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected PEER:GEOMEAN:MIN"):
            tables.bar_text(text)
