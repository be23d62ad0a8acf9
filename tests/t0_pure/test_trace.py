"""Reading kvtrace files: order, ids of sessions, and a clear refusal of what is malformed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import InputError
from kvfs.sim import trace
from kvfs.sim.trace import Trace

HEADER = {"kvtrace": 1, "name": "n", "source": "s", "licence": "l", "block_tokens": 128}


def write(tmp_path: Path, *lines: Any, header: Any = HEADER) -> Path:
    path = tmp_path / "x.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in (header, *lines)]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_plain_trace_keeps_its_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"t": 0, "in": 300, "r": [[0, 2], [7, 1]], "out": 5},
        "",
        {"t": 0.5, "in": 0, "r": []},
    )
    first, second = Trace(path).requests()
    assert first.runs == ((0, 2), (7, 1))
    assert (first.t, first.tokens, first.block_tokens, first.n_ids) == (0.0, 300, 128, 3)
    assert (first.line, second.line) == (2, 4)
    assert (second.tokens, second.runs, second.session) == (0, (), "")


def test_sessions_start_apart_and_have_ids_of_their_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"session": True, "s": "a", "blocks": 10},
        {"t": 0, "in": 128, "r": [[0, 1]]},
        {"t": 50, "in": 128, "r": [[9, 1]]},
        {"t": 250, "in": 128, "r": [[1, 1]]},
        {"session": True, "s": "b", "blocks": 5},
        {"t": 0, "in": 128, "r": [[0, 1]]},
        {"t": 20, "in": 128, "r": [[4, 1]]},
        {"session": True, "s": "c", "blocks": 1},
        {"t": 0, "in": 128, "r": [[0, 1]]},
    )
    found = [(r.t, r.session, r.runs[0][0]) for r in Trace(path).requests(session_gap=100)]
    assert found == [
        (0.0, "a", 0),
        (50.0, "a", 9),
        (100.0, "b", 10),
        (120.0, "b", 14),
        (200.0, "c", 15),
        (250.0, "a", 1),
    ]


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"session": True, "s": "a", "blocks": 2},
        {"t": 0, "in": 1, "r": [[0, 1]]},
        {"t": 0, "in": 2, "r": [[1, 1]]},
        {"session": True, "s": "b", "blocks": 1},
        {"t": 0, "in": 3, "r": [[0, 1]]},
    )
    assert [r.tokens for r in Trace(path).requests(session_gap=0)] == [1, 2, 3]


def test_a_trace_can_be_read_again(tmp_path: Path) -> None:
    opened = Trace(write(tmp_path, {"t": 0, "in": 1, "r": [[0, 1]]}))
    assert list(opened.requests()) == list(opened.requests())


def test_gzip_is_told_by_the_contents_not_by_the_name(tmp_path: Path) -> None:
    plain = write(tmp_path, {"t": 0, "in": 1, "r": [[0, 1]]})
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(Trace(packed).requests()) == list(Trace(plain).requests())


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ({"in": 1, "r": []}, "'t' must be"),
        ({"t": -1, "in": 1, "r": []}, "'t' must be"),
        ('{"t": NaN, "in": 1, "r": []}', "'t' must be"),
        ({"t": 10**400, "in": 1, "r": []}, "'t' must be"),
        ({"t": "0", "in": 1, "r": []}, "'t' must be"),
        ({"t": True, "in": 1, "r": []}, "'t' must be"),
        ({"t": 0, "r": []}, "'in' must be"),
        ({"t": 0, "in": -1, "r": []}, "'in' must be"),
        ({"t": 0, "in": 1.0, "r": []}, "'in' must be"),
        ({"t": 0, "in": 1 << 40, "r": []}, "'in' must be"),
        ({"t": 0, "in": 1}, "'r' must be"),
        ({"t": 0, "in": 1, "r": [1]}, "pairs of integers"),
        ({"t": 0, "in": 1, "r": [[1, 2, 3]]}, "pairs of integers"),
        ({"t": 0, "in": 1, "r": [[1, True]]}, "pairs of integers"),
        ({"t": 0, "in": 1, "r": [[-1, 1]]}, "outside"),
        ({"t": 0, "in": 1, "r": [[0, 0]]}, "outside"),
        ({"t": 0, "in": 1, "r": [[0, 1 << 60]]}, "outside"),
        ({"session": True, "s": "a", "blocks": 1}, "belong to none"),
        ({"t": 0.5, "in": 1, "r": []}, "time goes back"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: Any, what: str) -> None:
    path = write(tmp_path, {"t": 1, "in": 1, "r": [[0, 1]]}, line)
    with pytest.raises(InputError, match=what) as e:
        list(Trace(path).requests())
    assert str(e.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"t": 0, "in": 1, "r": [[2, 1]]}, "outside 0..1"),
        ({"session": True, "s": 1, "blocks": 1}, "'s' must be a string"),
        ({"session": True, "s": "a"}, "'blocks' must be"),
    ],
)
def test_a_malformed_session_is_named(tmp_path: Path, line: Any, what: str) -> None:
    path = write(tmp_path, {"session": True, "s": "a", "blocks": 2}, line)
    with pytest.raises(InputError, match=what) as e:
        list(Trace(path).requests())
    assert ", line 3: " in str(e.value)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("", "no header"),
        ("hello", "not JSON"),
        ({"t": 0}, "not a kvtrace file"),
        ({"kvtrace": 2, "block_tokens": 128}, "version 2 is not known"),
        ({"kvtrace": 1}, "no chain ids"),
        ({"kvtrace": 1, "block_tokens": None}, "no chain ids"),
        ({"kvtrace": 1, "block_tokens": 0}, "must not be 0"),
        ({"kvtrace": 1, "block_tokens": "128"}, "'block_tokens' must be"),
        ({"kvtrace": 1, "block_tokens": 128, "name": 3}, "'name' must be a string"),
    ],
)
def test_a_bad_header_is_named(tmp_path: Path, header: Any, what: str) -> None:
    path = write(tmp_path, header=header)
    with pytest.raises(InputError, match=what) as e:
        Trace(path)
    assert str(e.value).startswith(f"{path}, line 1: ")


def test_a_cut_gzip_file_is_named_where_it_ends(tmp_path: Path) -> None:
    whole = trace.builtin()["mooncake_conversation_2000"].read_bytes()
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    opened = Trace(path)
    with pytest.raises(InputError, match=r"line \d+: cannot be read"):
        list(opened.requests())


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="line 1: cannot be read"):
        Trace(path)


def test_a_file_that_is_not_there_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        Trace(tmp_path / "none")
    with pytest.raises(InputError, match="directory"):
        Trace(tmp_path)


def test_a_session_gap_must_be_a_length_of_time(tmp_path: Path) -> None:
    opened = Trace(write(tmp_path))
    for gap in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="session gap"):
            list(opened.requests(gap))


def test_traces_by_name() -> None:
    weka = trace.find("weka_claude_code_small")
    assert (weka.header.licence, weka.header.block_tokens) == ("Apache-2.0", 128)
    requests = list(weka.requests())
    assert len(requests) == weka.header.requests == 2287
    assert sum(r.tokens for r in requests) == 265_095_681
    assert sum(r.n_ids for r in requests) == 2_069_924
    assert [r.t for r in requests] == sorted(r.t for r in requests)
    assert len({r.session for r in requests}) == 46
    with pytest.raises(InputError, match="weka_claude_code_small"):
        trace.find("nothing_of_that_name")
