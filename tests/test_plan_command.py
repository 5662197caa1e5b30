import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from flowdflash.cli import main
from flowdflash.cli.plan_text import size, skew_sentence

PIPELINES = Path(__file__).parents[1] / "pipelines"
BRIEF, TINY = str(PIPELINES / "brief.yaml"), str(PIPELINES / "tiny.yaml")
A_TENTH = ("--set", "stages.corpus.scale=10")
REPAIRS = "tijdeman,golden_lattice,cross_bucket,optimal+tijdeman,sorted_budget+golden_lattice"


def plan(*arguments: str):
    return CliRunner().invoke(main, ["plan", *arguments])


def as_json(*arguments: str):
    done = plan(*arguments, "--format", "json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_brief_is_seen_at_once() -> None:
    done = plan(BRIEF)
    assert done.exit_code == 0 and done.stderr == ""
    assert "bucket 5 has 20.2% of the samples and makes 52.3% of the batches" in done.stdout
    assert "100,082 samples" in done.stdout and "6,440 batches, 805 optimizer steps of 8" in done.stdout


def test_what_repairs_the_brief_stands_beside_it() -> None:
    told = as_json(BRIEF, "--compare", REPAIRS)
    own = told["strategies"]["length+shuffle"]
    assert told["chosen"] == "length+shuffle" and told["window"] == 8
    assert own["longest_run"] >= 9 and own["noise_ratio"] == pytest.approx(1, abs=0.2)
    repaired = told["strategies"]["tijdeman"]
    assert repaired["longest_run"] == 2 and repaired["equal_neighbours"] <= 0.051
    assert repaired["prefix_discrepancy"] <= 0.9 + 1e-9 and repaired["homogeneous_windows"] == 0
    assert repaired["window_distinct"] >= 4.4 and repaired["window_distinct_min"] >= 3
    for window, limit in (("4", 0.31), ("8", 0.24), ("16", 0.13), ("32", 0.06)):
        assert repaired["noise_ratio_by_window"][window] <= limit
    assert abs(repaired["tail_share"]["5"] - 0.523) <= 0.02
    merged = told["strategies"]["cross_bucket"]
    assert -0.15 <= merged["throughput_gain"] <= -0.12 and merged["batches"] == 8079
    optimal = told["strategies"]["optimal+tijdeman"]
    assert optimal["padding_waste"] <= 0.175 and optimal["largest_batch_share"] <= 0.21 and optimal["longest_run"] == 1
    assert told["strategies"]["sorted_budget+golden_lattice"]["padding_waste"] <= 0.02
    assert all(strategy["coverage"] == 1 for strategy in told["strategies"].values())


def test_a_compared_strategy_is_what_the_pipeline_would_be_with_that_type() -> None:
    compared = as_json(BRIEF, *A_TENTH, "--compare", "tijdeman")["strategies"]["tijdeman"]
    changed = as_json(BRIEF, *A_TENTH, "--set", "stages.order.type=tijdeman")["strategies"]["length+tijdeman"]
    timing = {"plan_secs", "plan_batches_per_s"}
    assert {k: v for k, v in compared.items() if k not in timing} == {
        k: v for k, v in changed.items() if k not in timing
    }


def test_another_bucketer_takes_over_budget_and_number_of_buckets() -> None:
    told = as_json(BRIEF, *A_TENTH, "--set", "stages.buckets.edges=[1000, 8192]", "--compare", "optimal")
    assert len(told["strategies"]["optimal"]["buckets"]) == 2
    assert told["strategies"]["optimal"]["fill"] < 1


def test_a_strategy_that_the_pipeline_has_already_is_not_shown_twice() -> None:
    told = as_json(BRIEF, *A_TENTH, "--compare", "shuffle,length,tijdeman,length+tijdeman, ")
    assert list(told["strategies"]) == ["length+shuffle", "tijdeman"]


def test_a_pipeline_without_an_interleaver_is_compared_with_one(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    text = Path(TINY).read_text(encoding="utf-8")
    file.write_text(
        text.replace("  order: {kind: interleaver, type: stratified, inputs: buckets}\n", "").replace(
            "type: pull, inputs: order", "type: pull, inputs: buckets"
        ),
        encoding="utf-8",
    )
    told = as_json(str(file), "--compare", "tijdeman")
    bare, ordered = told["strategies"]["length"], told["strategies"]["tijdeman"]
    assert bare["interleaver"] is None and bare["longest_run"] > ordered["longest_run"]
    assert "none" in plan(str(file)).stdout


def test_a_run_of_several_epochs_is_told_as_a_whole() -> None:
    told = as_json(TINY)
    epoch = told["strategies"][told["chosen"]]
    assert told["run"]["epochs"] == 2 and told["run"]["samples"] == 2 * epoch["samples"] == 192
    assert "run: 2 epochs" in plan(TINY).stdout


def test_figures_for_programs_have_the_names_of_those_that_are_measured() -> None:
    told = as_json(TINY)
    names = (
        "longest_run equal_neighbours prefix_discrepancy window_distinct window_kl homogeneous_windows noise_ratio "
        "window_spread tokens_cv terms_cv adjacent_length_corr padding_waste fill coverage tail_share "
        "plan_batches_per_s"
    )
    assert set(names.split()) <= set(told["strategies"][told["chosen"]])
    [checkpoints] = told["memory"]["checkpoints"]
    assert checkpoints["sink"] == "save" and checkpoints["fits"] is True
    assert [edge["edge"] for edge in told["memory"]["edges"]] == ["dispatch->target", "target->drafter"]


@pytest.mark.parametrize(
    ("compare", "said"),
    [
        ("tijdman", "no interleaver or bucketer 'tijdman'; did you mean 'tijdeman'?"),
        ("tijdeman+shuffle", "names two interleavers"),
        ("qqqqqq", "there are "),
    ],
)
def test_a_strategy_that_does_not_exist_is_a_wrong_command_line(compare: str, said: str) -> None:
    done = plan(TINY, "--compare", compare)
    assert done.exit_code == 2 and said in done.stderr and done.stdout == ""


def test_a_bucketer_that_lacks_an_option_says_which() -> None:
    done = plan(TINY, "--compare", "cross_bucket")
    assert done.exit_code == 78 and "--compare cross_bucket: edges" in done.stderr and "stages.buckets" in done.stderr


def test_the_check_of_a_compared_bucketer_counts() -> None:
    options = ("--set", "stages.buckets.token_budget=4096", "--set", "stages.buckets.over_budget=alone")
    done = plan(BRIEF, *A_TENTH, *options, "--compare", "cross_bucket")
    assert done.exit_code == 78 and "--compare cross_bucket: token_budget" in done.stderr


def test_an_invalid_pipeline_is_told_as_anywhere_else() -> None:
    done = plan(BRIEF, "--set", "stages.buckets.token_budget=100")
    assert done.exit_code == 78 and "stages.buckets.token_budget" in done.stderr


class Tags(HTMLParser):
    """Tags in order, what is open, and every address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


def test_the_page_has_its_plots_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    done = plan(BRIEF, *A_TENTH, "--compare", REPAIRS, "--html", str(out))
    assert done.exit_code == 0 and "longest run of one bucket" in done.stdout
    page = out.read_text(encoding="utf-8")
    tags = Tags(page)
    assert tags.open == [] and tags.addresses == [] and "script" not in tags.tags and "url(" not in page
    assert tags.tags.count("svg") == 4 and tags.tags.count("polyline") == 6
    assert "@media(prefers-color-scheme:dark)" in page
    said = " ".join(tags.text)
    assert (
        "Bucket 5 has 20.2% of the samples" in said
        and "sorted_budget" in said
        and "NaN" not in page
        and "inf" not in said
    )


def test_the_page_can_be_the_output_and_a_name_cannot_break_it() -> None:
    done = plan(TINY, "--set", "name=a<b>&c", "--format", "html")
    assert done.exit_code == 0 and done.stdout.startswith("<!doctype html>")
    assert "a<b>" not in done.stdout and "a&lt;b&gt;&amp;c" in done.stdout and Tags(done.stdout).open == []


def test_batches_without_buckets_are_drawn_by_length(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    text = Path(TINY).read_text(encoding="utf-8")
    bare = text.replace("type: length, inputs: corpus, buckets: 3,", "type: sorted_budget, inputs: corpus,")
    assert bare != text
    file.write_text(bare, encoding="utf-8")
    done = plan(str(file), "--format", "html")
    assert done.exit_code == 0 and Tags(done.stdout).tags.count("svg") == 4
    assert len(set(re.findall(r'y="0" width="[0-9.]+" height="13" fill="(#[0-9a-f]{6})"', done.stdout))) > 2
    told = as_json(str(file))["strategies"]["sorted_budget+stratified"]
    assert told["longest_run"] is None and [row["bucket"] for row in told["buckets"]] == [-1]
    assert "longest run" not in plan(str(file)).stdout


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    done = plan(TINY, "--html", str(tmp_path / "no" / "plan.html"))
    assert done.exit_code == 1 and "plan.html" in done.stderr


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\nfrom flowdflash.cli import main\n"
        f"arguments = ['plan', {TINY!r}, '--compare', 'shuffle,optimal,sorted_budget', '--format', 'html']\n"
        "main(arguments, standalone_mode=False)\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'wandb')]\n"
        "assert not bad, bad[:3]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_only_a_bucket_that_makes_far_more_batches_than_its_samples_is_pointed_out() -> None:
    row = {"bucket": 0, "sample_share": 0.5, "batch_share": 0.6}
    assert skew_sentence([row, {"bucket": 1, "sample_share": 0.1, "batch_share": 0.3}]) == ""
    assert skew_sentence([]) == ""
    assert "bucket 1 has 10.0%" in skew_sentence([row, {"bucket": 1, "sample_share": 0.1, "batch_share": 0.7}])


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (5 << 50, "5,120.0 TiB")],
)
def test_sizes_are_told_in_units_of_1024(count: int, said: str) -> None:
    assert size(count) == said
