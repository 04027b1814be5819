import json

import pytest

from benchmarks import report
from benchmarks.__main__ import build_parser, main
from benchmarks.cases import LARGE_ANSWER_BYTES, cases, large_body, stream_body, unary_body
from benchmarks.report import Outcome
from benchmarks.stats import Comparison, Growth, Sample


def comparison(gateway_us: float, haproxy_us: float) -> Comparison:
    return Comparison([Sample(1, 1.0, gateway_us / 1e6)], [Sample(1, 1.0, haproxy_us / 1e6)], [Sample(9, 1.0)])


MET = Outcome("a", "case a", "request", 6.0, comparison(50, 10))
MISSED = Outcome("b", "case b", "event", 2.0, comparison(30, 10))
FREE = Outcome("c", "case c", "event", None, comparison(30, 10))
FAILED = Outcome("d", "case d", "request", 6.0, error="wrong answer: status 500")
# The least of each is 3 apart, the rounds are 1.5, 6 and 6.
UNLIKE = Outcome(
    "f",
    "case f",
    "request",
    4.0,
    Comparison(
        [Sample(1, 1.0, us / 1e6) for us in (30, 60, 60)], [Sample(1, 1.0, us / 1e6) for us in (20, 10, 10)], []
    ),
)
FLAT = Outcome("e", "case e", "request", None, Growth(100, [1000, 2000, 2000]))


@pytest.mark.parametrize(
    ("outcome", "is_met"), [(MET, True), (MISSED, False), (FREE, None), (FAILED, None), (FLAT, True), (UNLIKE, False)]
)
def test_aims(outcome: Outcome, is_met: bool | None) -> None:
    assert outcome.is_met is is_met


def test_text_says_what_is_met_and_what_failed() -> None:
    text = report.text([MET, MISSED, FREE, FAILED, FLAT])
    lines = {line[:6]: line for line in text.splitlines()}
    assert "5.00" in lines["case a"]
    assert "<= 6  " in lines["case a"]
    assert " met " in lines["case a"]
    assert " missed " in lines["case b"]
    assert "met" not in lines["case c"]
    assert "FAILED: wrong answer" in lines["case d"]
    assert "aim flat, met" in lines["case e"]


def test_columns_line_up() -> None:
    assert report.table([("a", "b", "c"), ("aaa", "b", "ccc")]) == "a    b    c\naaa  b  ccc"


def test_json_holds_every_sample_and_can_be_written() -> None:
    found = json.loads(json.dumps(report.as_json([MET, FAILED, FLAT], {"x": 1.5}, {"cores": "2"})))
    assert [case["name"] for case in found["cases"]] == ["a", "d", "e"]
    assert found["cases"][0]["samples"]["direct"][0]["items"] == 9
    assert found["cases"][1]["error"]
    assert found["cases"][2]["rss_bytes"] == [1000, 2000, 2000]
    assert found["micro_us"] == {"x": 1.5}


def test_bodies_have_the_sizes_that_the_cases_are_named_after() -> None:
    assert len(unary_body()) == 1024
    assert 550_000 < len(large_body()) < 750_000
    assert json.loads(stream_body(100))["max_tokens"] == 100
    assert LARGE_ANSWER_BYTES == 20 * 1024 * 1024


def test_names_are_unique_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*names, "micro"]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        build_parser(["a"]).parse_args(["--only", "b"])
    assert refused.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.__main__.shutil.which", lambda program: None)
    assert main(["--only", "unary-1"]) == 2
    assert "apt install haproxy wrk" in capsys.readouterr().err
