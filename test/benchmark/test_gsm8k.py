"""GSM8K client: numbers of answers, data, and whole runs against a stub server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import bench_sglang
import pytest
from bench_http import Generated, ServerFacts, open_client
from bench_stub import Stub, native
from gsm8k_data import DataError, build_prompt, choose, extract_number, load, load_file
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.timeout(60)

TINY = Path(__file__).resolve().parents[1] / "data" / "gsm8k_tiny.jsonl"
SCRIPT = Path(bench_sglang.__file__)
INFO = {
    "version": "0.5.17",
    "model_path": "some/model",
    "internal_states": [{"avg_spec_accept_length": 3.5}, {"avg_spec_accept_length": 2.5}, {}],
}


# ------------------------------------------------------------------------------------------------------ extraction


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9 * 2 = 18\n#### 18", "18"),
        ("####18", "18"),
        ("#### 18.", "18"),
        ("#### $18.00", "18"),
        ("#### \\$18", "18"),
        ("#### $ 18", "18"),
        ("#### 18%", "18"),
        ("#### 18 dollars (not 20)", "18"),
        ("#### **18**", "18"),
        ("#### 1,234", "1234"),
        ("#### $1,234,567.50.", "1234567.5"),
        ("#### 1{,}234", "1234"),
        ("#### 1\u202f234", "1234"),
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),
        ("#### - 5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### +5", "5"),
        ("#### .5", "0.5"),
        ("#### 0.50", "0.5"),
        ("#### 1e3", "1000"),
        ("#### \u20ac7", "7"),
        ("#### 18\n\nQuestion: What is 2 + 2?\nAnswer: #### 4", "18"),
        ("#### 18 #### 4", "18"),
        ("#### Step 1\nFirst 3, then 4.\n#### Step 2\nSo it is 12.", "12"),
        ("The answer is 18.", "18"),
        ("It is 18, as 20 - 2 = 18!", "18"),
        ("So $18.00 a day.", "18"),
        ("$\\boxed{18}$", "18"),
        ("a range of 5-10", "10"),
        ("f(2)-3", "3"),
        ("48/2 = 24", "24"),
        ("He runs 3 km/day.", "3"),
        ("18 cm2", "18"),
        ("18 m^2", "18"),
        ("18 m^{2}", "18"),
        ("24 H2O", "24"),
        ("2 + 2 = 4 Question: and 7?", "4"),
    ],
)
def test_number_of_an_answer(text: str, expected: str) -> None:
    assert extract_number(text) == Decimal(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot tell.",
        "####",
        "It is 18. ####",
        "It is 18.\n#### ",
        "Question: 18",
        "#### 3/4",
        "#### 3 / 4",
        "#### 5 1/2",
        "#### 5\u00bd",
        "#### \\frac{3}{4}",
        "so half of it, 3/4",
        "on 3/4/2020",
        "#### 2^5",
        "#### 10:30",
        "#### 1,23",
        "#### 1,2345",
        "#### 12,34,567",
        "#### 1.2.3",
        "#### 1.234,5",
        "#### -$-5",
        "the numbers 3,4,5",
        "release v1.5",
        "\u00bd",
    ],
)
def test_no_number_is_guessed(text: str) -> None:
    assert extract_number(text) is None


@given(
    value=st.decimals(min_value=-(10**12), max_value=10**12, places=2),
    style=st.sampled_from(["{:,}", "{}", "{:,.2f}", "{:f}"]),
    before=st.sampled_from(["#### ", "#### $", "The answer is ", "= **", "so $", "x\n#### -1\nQuestion: #### "]),
    after=st.sampled_from(["", ".", "%", " dollars", "**", ",", "\n", " Question: 7", "!\nQuestion: #### 8"]),
)
def test_any_number_in_any_format(value: Decimal, style: str, before: str, after: str) -> None:
    expected = Decimal(-1) if "Question" in before else value
    assert extract_number(before + style.format(value) + after) == expected


@given(st.text(alphabet="0123456789.,-+$%/^:eE #=\n\u00bd\\frac{}xQ", max_size=60))
def test_any_text_gives_a_number_or_none(text: str) -> None:
    number = extract_number(text)
    assert number is None or number.is_finite()


@pytest.mark.timeout(10)
@pytest.mark.parametrize("unit", ["1", "x1", "1 ", "1,", "1.", "#### ", "\\frac{", "1/", "$ ", "-", "1:", "e1"])
def test_long_nonsense_takes_no_time(unit: str) -> None:
    number = extract_number(unit * 8000)
    assert number is None or number.is_finite()


# ------------------------------------------------------------------------------------------------------------ data


def line(number: int) -> str:
    return json.dumps({"question": f"What is {number}?", "answer": f"Think.\n#### {number}"})


def write_lines(path: Path, numbers: range) -> Path:
    path.write_text("\n".join(line(number) for number in numbers) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, numbers: range) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([json.loads(line(number)) for number in numbers]), path)
    return path


def expected(questions: list[Any]) -> list[int]:
    return [int(question.expected) for question in questions]


def test_the_tiny_file() -> None:
    questions = load_file(TINY)
    assert len(questions) == 12
    assert {Decimal("1200"), Decimal("-5"), Decimal("21.5"), Decimal("4690")} < {q.expected for q in questions}
    assert questions[2].place == f"{TINY} line 3"


def test_examples_are_the_first_lines_of_a_file(tmp_path: Path) -> None:
    examples, asked = choose(write_lines(tmp_path / "x.jsonl", range(10)), 3, 4)
    assert (expected(examples), expected(asked)) == ([0, 1, 2], [3, 4, 5, 6])


def test_parquet_is_read_like_jsonl(tmp_path: Path) -> None:
    questions = load_file(write_parquet(tmp_path / "x.parquet", range(3)))
    assert expected(questions) == [0, 1, 2]
    assert questions[1].place.endswith("x.parquet row 2")


def test_a_folder_with_both_splits(tmp_path: Path) -> None:
    write_lines(tmp_path / "test.jsonl", range(10, 13))
    write_lines(tmp_path / "train.jsonl", range(5))
    write_lines(tmp_path / "test_socratic.jsonl", range(90, 99))
    examples, asked = choose(tmp_path, 2, 100)
    assert (expected(examples), expected(asked)) == ([0, 1], [10, 11, 12])


def test_a_folder_of_parquet_shards_below_main(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    write_parquet(tmp_path / "main" / "test-00000-of-00002.parquet", range(2))
    write_parquet(tmp_path / "main" / "test-00001-of-00002.parquet", range(2, 4))
    assert expected(load(tmp_path)[0]) == [0, 1, 2, 3]


def test_jsonl_goes_before_parquet_of_the_same_split(tmp_path: Path) -> None:
    write_parquet(tmp_path / "test.parquet", range(2))
    write_lines(tmp_path / "test.jsonl", range(7, 9))
    assert expected(load(tmp_path)[0]) == [7, 8]


def test_the_only_file_of_a_folder_may_have_any_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "mine.jsonl", range(3))
    assert expected(load(tmp_path)[0]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("second_line", "said"),
    [
        ("{not json", "x.jsonl line 2 is not JSON"),
        ("[1]", "x.jsonl line 2 has no text in its field `question`"),
        ('{"question": "a"}', "x.jsonl line 2 has no text in its field `answer`"),
        ('{"question": " ", "answer": "#### 1"}', "x.jsonl line 2 has no text in its field `question`"),
        ('{"question": "a", "answer": "it is 3"}', "x.jsonl line 2: the answer does not end in `#### number`"),
        ('{"question": "a", "answer": "3 #### none"}', "x.jsonl line 2: the answer does not end in `#### number`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, second_line: str, said: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{line(1)}\n{second_line}\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2") as error:
        load_file(path)
    assert said in str(error.value)


def test_what_is_no_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "folder").mkdir()
    for name, said in {
        "gone.jsonl": "does not exist",
        "empty.jsonl": "holds no questions",
        "latin.jsonl": "is not UTF-8 text",
        "broken.parquet": "cannot be read as parquet",
        "folder": "has no test split",
    }.items():
        with pytest.raises(DataError, match=said) as error:
            load(tmp_path / name)
        assert name in str(error.value)
    other = tmp_path / "data.csv"
    other.touch()
    with pytest.raises(DataError, match=r"neither \.jsonl nor \.parquet"):
        load(other)


def test_too_few_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "test.jsonl", range(3))
    with pytest.raises(DataError, match="none is left after 3"):
        choose(path, 3, 1)
    write_lines(tmp_path / "train.jsonl", range(2))
    with pytest.raises(DataError, match="train split"):
        choose(tmp_path, 3, 1)


def test_the_prompt_holds_worked_examples_and_no_answer() -> None:
    examples, asked = choose(TINY, 2, 1)
    prompt = build_prompt(examples, asked[0])
    assert prompt.count("Question: ") == 3
    assert prompt.count("#### ") == 2
    assert prompt.endswith(f"Question: {asked[0].question}\nAnswer:")


# --------------------------------------------------------------------------------------------------------- figures


def test_accept_length_is_weighted_by_tokens() -> None:
    answers = [
        Generated(output_count=30, accept_length=3.0, verify_steps=10),
        Generated(output_count=10, accept_length=1.0, verify_steps=10),
        Generated(output_count=10),
    ]
    assert bench_sglang.mean_accept_length(answers) == pytest.approx(2.5)
    assert bench_sglang.tokens_per_step(answers) == pytest.approx(2.0)
    assert bench_sglang.mean_accept_length(answers[2:]) is None


def test_first_difference() -> None:
    assert bench_sglang.first_difference([1, 2], [1, 2]) is None
    assert bench_sglang.first_difference([1, 2], [1, 3]) == 1
    assert bench_sglang.first_difference([1], [1, 2]) == 1


# ------------------------------------------------------------------------------------------------------ whole runs

QUESTIONS = load_file(TINY)[2:]


def asked_number(body: dict[str, Any]) -> int:
    """Which question (from 0) a prompt asks last."""
    last = (body.get("text") or body["prompt"]).rpartition("Question: ")[2]
    return next(number for number, q in enumerate(QUESTIONS) if last.startswith(q.question))


def right(body: dict[str, Any]) -> dict[str, Any]:
    number = asked_number(body)
    text = f" It is #### {QUESTIONS[number].expected}"
    return native(text, [7] * (number + 1), spec_accept_length=4.0, spec_verify_ct=2)


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "result.json"
    command = ["--data-path", str(TINY), "--num-shots", "2", "--timeout", "20", "--json", str(path), *options]
    status = bench_sglang.main(command)
    return status, json.loads(path.read_text(encoding="utf-8"))


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(right, {"/server_info": INFO}) as stub:
        status, result = run(tmp_path, "--port", str(stub.port), "--parallel", "3")
        assert stub.paths == ["/generate"] * 10
        assert stub.most_at_once <= 3
        assert {body["sampling_params"]["temperature"] for body in stub.bodies} == {0.0}
        assert {body["sampling_params"]["max_new_tokens"] for body in stub.bodies} == {512}
    side = result["sides"]["server"]
    assert status == 0
    assert (side["accuracy"], side["invalid"], side["failed"], side["output_tokens"]) == (1.0, 0, 0, 55)
    assert side["accept_length"] == pytest.approx(4.0)
    assert side["tokens_per_verify_step"] == pytest.approx(55 / 20)
    assert side["server_accept_lengths"] == [3.5, 2.5]
    assert side["server"] == {"version": "0.5.17", "model_path": "some/model"}
    assert result["arguments"]["num_shots"] == 2
    assert result["date"].endswith("+00:00")
    assert [question["expected"] for question in result["questions"]] == [str(q.expected) for q in QUESTIONS]
    assert result["questions"][1]["answers"]["server"]["number"] == "280"
    shown = capsys.readouterr()
    for text in ("Accuracy", "1.000 (10 of 10)", "Invalid", "Latency", "Output tokens/s", "3.500, 2.500", "some/model"):
        assert text in shown.out
    assert "10 questions to ask" in shown.err


def test_wrong_invalid_and_failed_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        number = asked_number(body)
        special = {
            1: native("It is #### 1", [1]),
            2: native("I give up.", [1]),
            3: {"error": {"message": "out of [memory]"}, "status": 500},
            4: native("", [], finish_reason={"type": "abort", "message": "AlignmentError"}),
            5: {"detail": "no answer"},
        }
        return special.get(number) or native(f"#### {QUESTIONS[number].expected}", [1])

    with Stub(answer) as stub:
        status, result = run(tmp_path, "--port", str(stub.port), "--num-questions", "7")
    side = result["sides"]["server"]
    assert status == 1
    assert {key: side[key] for key in ("questions", "answered", "right", "wrong", "invalid", "failed")} == {
        "questions": 7,
        "answered": 4,
        "right": 2,
        "wrong": 1,
        "invalid": 1,
        "failed": 3,
    }
    assert side["accuracy"] == 0.5
    errors = [question["answers"]["server"].get("error", "") for question in result["questions"]]
    assert "HTTP 500" in errors[3]
    assert "out of [memory]" in errors[3]
    assert "AlignmentError" in errors[4]
    assert "neither text nor output_ids" in errors[5]
    assert "failed: server, question 3: http://127.0.0.1" in capsys.readouterr().err


def test_figures_that_are_not_told_are_not_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(lambda body: {"text": f"#### {QUESTIONS[asked_number(body)].expected}"}) as stub:
        status, result = run(tmp_path, "--port", str(stub.port), "--num-questions", "2")
    side = result["sides"]["server"]
    assert status == 0
    for figure in ("accept_length", "tokens_per_verify_step", "output_tokens", "output_tokens_per_s"):
        assert side[figure] is None
    assert (side["server"], side["server_accept_lengths"]) == ({}, [])
    assert any("/server_info: HTTP 404" in note for note in side["not_told"])
    accept = [row for row in capsys.readouterr().out.splitlines() if "Accept length" in row]
    assert len(accept) == 2
    assert all("n/a" in row for row in accept)


def test_openai_route(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        text = f"#### {QUESTIONS[asked_number(body)].expected}"
        return {"choices": [{"text": text, "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}

    with Stub(answer, {"/v1/models": {"data": [{"id": "served"}]}}) as stub:
        options = ("--port", str(stub.port), "--route", "openai", "--num-questions", "2", "--max-new-tokens", "9")
        status, result = run(tmp_path, *options)
        assert stub.paths == ["/v1/completions"] * 2
        assert (stub.bodies[0]["model"], stub.bodies[0]["max_tokens"]) == ("served", 9)
    side = result["sides"]["server"]
    assert (status, side["accuracy"], side["output_tokens"], side["accept_length"]) == (0, 1.0, 8, None)


def test_router_that_lists_decode_servers(tmp_path: Path) -> None:
    info = {"prefill": [{"internal_states": [{}]}], "decode": [{"internal_states": [{"avg_spec_accept_length": 2}]}]}
    with Stub(right, {"/get_server_info": info}) as stub:
        _, result = run(tmp_path, "--port", str(stub.port), "--num-questions", "1")
    assert result["sides"]["server"]["server_accept_lengths"] == [2.0]


def test_two_servers_question_by_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def other(body: dict[str, Any]) -> dict[str, Any]:
        number = asked_number(body)
        if number == 3:
            return {"status": 503, "detail": "busy"}
        found = right(body)
        if number == 1:
            found["text"] = "#### 1"
            found["output_ids"] = [7, 8]
        if number == 2:
            del found["output_ids"]
        found["meta_info"]["spec_accept_length"] = 3.0
        return found

    with Stub(right, {"/server_info": INFO}) as one, Stub(other) as two:
        options = ("--port", str(one.port), "--compare-port", str(two.port), "--num-questions", "4")
        status, result = run(tmp_path, *options)
        assert len(one.bodies) == len(two.bodies) == 4
    assert status == 1
    assert result["comparison"] == {
        "questions": 3,
        "same_answer": 2,
        "both_right": 2,
        "one_right": 1,
        "none_right": 0,
        "same_text": 2,
        "same_tokens": 1,
        "same_tokens_of": 2,
        "accept_length_difference_mean": -1.0,
        "accept_length_difference_of": 3,
    }
    rows = [question["comparison"] for question in result["questions"]]
    assert rows[3] is None
    assert (rows[1]["right"], rows[1]["first_different_token"], rows[2]["same_tokens"]) == ("one", 1, None)
    assert rows[0]["accept_length"] == [4.0, 3.0]
    assert (result["sides"]["server"]["failed"], result["sides"]["compared"]["failed"]) == (0, 1)
    shown = capsys.readouterr().out
    assert "Right: both 2, one 1, none 0. Same tokens: 1 of 2." in shown
    assert "mean -1.000 over 3 questions" in shown


def test_a_server_that_hangs_is_timed_out(tmp_path: Path) -> None:
    gate = threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        gate.wait(10)
        return right(body)

    with Stub(answer) as stub:
        status, result = run(tmp_path, "--port", str(stub.port), "--num-questions", "1", "--timeout", "0.3")
        gate.set()
    assert status == 1
    assert "no complete answer within 0.3 s" in result["questions"][0]["answers"]["server"]["error"]


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Stub(right) as stub:
        port = stub.port
    assert bench_sglang.main(["--data-path", str(TINY), "--num-shots", "2", "--port", str(port)]) == 1
    assert "is the server running?" in capsys.readouterr().err


def test_a_server_that_is_gone_after_the_run_costs_no_result() -> None:
    with Stub(right) as stub:
        url = stub.url
    side = bench_sglang.Side("server", url, ServerFacts({"version": "0.5.17"}, [3.0], []))

    async def ask() -> None:
        async with open_client(5.0) as client:
            await bench_sglang.read_accept_lengths(client, side)

    asyncio.run(ask())
    assert side.facts.told == {"version": "0.5.17"}
    assert side.facts.accept_lengths == []
    assert "after the run: cannot connect" in side.facts.notes[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--data-path is missing: get test.jsonl"),
        (["--data-path", "no-such-file"], "no-such-file does not exist"),
        (["--data-path", str(TINY), "--num-shots", "12"], "none is left after 12"),
        (["--data-path", str(TINY), "--compare-host", "a"], "--compare-host needs --compare-port"),
        (["--port", "0"], "--port"),
        (["--port", "70000"], "is not a port"),
        (["--parallel", "none"], "is not a whole number"),
        (["--num-questions", "0"], "0 is less than 1"),
        (["--temperature", "-1"], "-1 is not 0 or more"),
        (["--timeout", "nan"], "not a positive number of seconds"),
        (["--route", "grpc"], "--route"),
        (["--json", "no-such-folder/x.json"], "the folder of no-such-folder/x.json does not exist"),
    ],
)
def test_usage_errors(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_sglang.main(options)
    assert stopped.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupt_leaves_cleanly(tmp_path: Path) -> None:
    gate, arrived = threading.Event(), threading.Event()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        arrived.set()
        gate.wait(20)
        return right(body)

    copy = tmp_path / "data.jsonl"
    shutil.copyfile(TINY, copy)
    with Stub(answer) as stub:
        command = [sys.executable, str(SCRIPT), "--port", str(stub.port), "--data-path", str(copy), "--num-shots", "2"]
        command += ["--json", str(tmp_path / "result.json")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert arrived.wait(20)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=15)
        finally:
            process.kill()
            process.wait(10)
            gate.set()
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
