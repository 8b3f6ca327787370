"""``receipts``: one line an update, exact, and two histories compared."""

from __future__ import annotations

import itertools
import json

import pytest
from published import flip

from coherent_ray.cli.receipts import followed
from coherent_ray.train.receipts import ReceiptChain


@pytest.fixture
def other(tmp_path, make_run):
    """Make a second run: `updates` of them, of the same history or another."""

    def make(*updates: int, seed: int = 0):
        run = make_run(tmp_path / "other", run_id="second")
        run.open_attempt()
        for update in updates:
            run.publish(update, ranks=1, seed=seed)
        return run

    return make


def test_one_line_an_update(call, published):
    done = call("receipts", published.root)
    assert done.code == 0
    titles, *rows = done.rows()
    assert titles[0] == "update"
    assert [row[0] for row in rows] == [str(update) for update in range(1, 31)]
    assert rows[0][:8] == ["1", "0", "0", "to", "32", "32", "2.000000", "1"]
    assert rows[4][8] == "skipped"
    # A state is known where a generation is, and the two equal rates are told once.
    assert [row[0] for row in rows if row[-1] != "-"] == ["10", "20", "30"]
    assert rows[0][8] == "0.1"


def test_json_lines_are_exact(call, published):
    done = call("receipts", published.root, "--json")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 31))
    assert float.fromhex(lines[2]["loss"]) == 2.0 / 3
    for before, after in itertools.pairwise(lines):
        assert after["previous"] == before["digest"]


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        (["--last", "2"], [29, 30]),
        (["--from", "28"], [28, 29, 30]),
        (["--from", "5", "--last", "1"], [30]),
        (["--from", "31"], []),
        (["--last", "99"], list(range(1, 31))),
    ],
)
def test_a_part(call, published, options, updates):
    done = call("receipts", published.root, "--json", *options)
    assert [json.loads(line)["update"] for line in done.out.splitlines()] == updates


def test_the_same_history_saved_elsewhere_at_other_updates(call, published, other):
    done = call("receipts", published.root, "--against", other(7, 30).root)
    assert done.code == 0
    assert done.out == "the same, all 30 updates\n"


def test_another_history_is_told_where_it_parts(call, published, other):
    run = other(30, seed=1)
    done = call("receipts", published.root, "--against", run.root)
    assert done.code == 1
    assert done.out.startswith("they part at update 1: loss is 0x1.0")
    value = call("receipts", published.root, "--against", run.root, "--json").json
    assert value["same"] is False
    assert (value["difference"]["update"], value["difference"]["field"]) == (1, "loss")


def test_a_shorter_history(call, published, other):
    run = other(20)
    done = call("receipts", published.root, "--against", run.root)
    assert (done.code, done.out) == (1, "the other ends before update 21, which this run has\n")
    done = call("receipts", run.root, "--against", published.root)
    assert (done.code, done.out) == (1, "this run ends before update 21, which the other has\n")


def test_a_damaged_segment(call, published):
    segments = sorted((published.root / "receipts").iterdir())
    flip(segments[1], 10)
    done = call("receipts", published.root, "--json")
    assert done.code == 1
    *lines, error = _values(done.out)
    assert [line["update"] for line in lines] == list(range(1, 11))
    assert error["error"]["type"] == "ReceiptsDamaged"
    assert error["error"]["where"] == f"receipts/{segments[1].name}"
    assert error["error"]["details"]["readable_until"] == 10


@pytest.mark.parametrize("options", [["--last", "12"], ["--from", "19"]])
def test_damage_long_before_what_is_shown_is_not_in_its_way(call, published, options):
    segments = sorted((published.root / "receipts").iterdir())
    flip(segments[0], 10)
    done = call("receipts", published.root, "--json", *options)
    assert done.code == 0
    assert [json.loads(line)["update"] for line in done.out.splitlines()] == list(range(19, 31))
    plain = call("receipts", published.root, *options)
    assert plain.code == 0
    assert plain.out.splitlines()[-1] == (
        "what was before update 19 was not looked at; `verify --all` does"
    )
    assert call("verify", published.root, "--all").code == 1
    assert call("receipts", published.root, "--last", "30").code == 1


@pytest.mark.parametrize("options", [["--last", "12"], ["--from", "19"]])
@pytest.mark.parametrize("at", [1, 2])
def test_damage_in_what_is_shown_is_told(call, published, options, at):
    segments = sorted((published.root / "receipts").iterdir())
    flip(segments[at], 10)
    done = call("receipts", published.root, "--json", *options)
    assert done.code == 1
    assert _values(done.out)[-1]["error"]["where"] == f"receipts/{segments[at].name}"


def test_a_part_that_begins_with_the_first_update_is_checked_from_the_plan_on(call, published):
    done = call("receipts", published.root, "--last", "30")
    assert done.code == 0
    assert "not looked at" not in done.out


def test_a_run_without_updates(call, tmp_path, make_run):
    make_run(tmp_path / "new").open_attempt()
    assert call("receipts", tmp_path / "new", "--json").out == ""
    assert len(call("receipts", tmp_path / "new").rows()) == 1


# --- following ------------------------------------------------------------------------------------


def follow(run, steps):
    """Follow a run, carrying out one step whenever it waits; return updates and losses."""
    todo = list(steps)

    def wait():
        if not todo:
            raise KeyboardInterrupt
        todo.pop(0)()

    found = []
    try:
        found.extend((each.update, each.loss) for each in followed(run.storage, 1, wait))
    except KeyboardInterrupt:
        found.append("interrupted")
    return found


def test_what_is_published_meanwhile_is_told_once(tmp_path, make_run):
    run = make_run(tmp_path / "run")
    run.open_attempt()
    run.publish(2)
    steps = [lambda: None, lambda: run.publish(5), lambda: None, lambda: run.publish(6)]
    found = follow(run, steps)
    assert [entry[0] for entry in found[:-1]] == [1, 2, 3, 4, 5, 6]
    assert found[-1] == "interrupted"


def test_a_resume_that_went_back_is_told_again_from_there(tmp_path, make_run):
    run = make_run(tmp_path / "run")
    run.open_attempt()
    run.publish(2)
    at_two = run.chain.tip

    def back():
        run.open_attempt()
        run.chain = ReceiptChain(at_two, 2)
        run.publish(4, seed=1)

    found = follow(run, [lambda: run.publish(5), back])
    assert [entry[0] for entry in found[:-1]] == [1, 2, 3, 4, 5, 3, 4]
    assert found[2] != found[5]


def test_it_ends_with_the_run(call, published, monkeypatch):
    monkeypatch.setattr("coherent_ray.cli.receipts.length_of", lambda header: 30)
    done = call("receipts", published.root, "--follow", "--last", "2")
    assert done.code == 0
    assert [row[0] for row in done.rows()] == ["update", "29", "30"]
    lines = call("receipts", published.root, "-f", "--from", "30", "--json").out.splitlines()
    assert [json.loads(line)["update"] for line in lines] == [30]


def test_ctrl_c_ends_it_well(call, published, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("coherent_ray.cli.receipts.time.sleep", interrupt)
    done = call("receipts", published.root, "--follow")
    assert done.code == 0
    assert len(done.rows()) == 31


def test_following_and_comparing_exclude_each_other(call, published):
    done = call("receipts", published.root, "--follow", "--against", published.root)
    assert done.code == 2
    assert "exclude each other" in done.err


def test_a_generation_is_misuse(call, published):
    done = call("receipts", f"{published.root}@g1")
    assert done.code == 2
    assert "takes a whole run" in done.err


def _values(text: str) -> list[dict]:
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        value, at = decoder.raw_decode(text, at)
        values.append(value)
        at += 1
    return values
