import importlib.metadata
import itertools
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from flowdflash.errors import PluginBroken
from flowdflash.plugin import hookimpl
from flowdflash.plugin.loader import Plugins, load_plugins

STAGE = '''
from flowdflash.plugin import hookimpl
from flowdflash.stage import Interleaver


class {cls}(Interleaver):
    """{cls} order."""

    type = "{type}"

    def order(self, batches, history, rng):
        return range(len(batches))


@hookimpl
def flowdflash_register(registry):
    registry.register({cls})
'''


NUMBER = itertools.count()


class Site:
    """A folder on sys.path with distributions that are as good as installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name, source, *, entry="", requires=(), version="1.0"):
        module = f"mod_{self.folder.name}_{name}".replace("-", "_")
        (self.folder / f"{module}.py").write_text(dedent(source))
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n")
        (info / "entry_points.txt").write_text(f"[flowdflash]\n{entry or name} = {module}\n")


@pytest.fixture
def real_site(tmp_path, monkeypatch):
    """Beside whatever is installed in this environment. Module names hold the folder's, so that none is reused."""
    folder = tmp_path / f"s{next(NUMBER)}"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return Site(folder)


@pytest.fixture
def site(real_site, monkeypatch):
    """Nothing else is installed."""

    def only_here(*, group):
        found = importlib.metadata.distributions(path=[str(real_site.folder)])
        return [point for dist in found for point in dist.entry_points if point.group == group]

    monkeypatch.setattr("flowdflash.plugin.loader.installed", only_here)
    return real_site


def stage(cls="Mine", type="mine"):
    return STAGE.format(cls=cls, type=type)


def load(**options):
    return load_plugins(builtin=[], **options)


def of(plugins, name):
    return next(info for info in plugins.infos if info.name == name)


def test_an_installed_plugin_is_found_by_its_entry_point(real_site):
    real_site.install("good", stage())
    plugins = load()
    assert plugins.registry.get("interleaver", "mine").__name__ == "Mine"
    info = of(plugins, "good")
    assert (info.origin, info.version, info.hooks, info.error) == (
        "distribution good",
        "1.0",
        ("flowdflash_register",),
        "",
    )
    assert [r.type for r in info.stages] == ["mine"] and info.import_secs > 0


def test_an_in_process_plugin_and_an_installed_one_both_run(site):
    site.install("good", stage())
    seen = []
    own = SimpleNamespace(__name__="own", flowdflash_step=hookimpl(lambda record: seen.append(record)))
    plugins = load_plugins(builtin=[own])
    plugins.notify("flowdflash_step", record=1)
    assert seen == [1] and plugins.registry.get("interleaver", "mine")
    assert of(plugins, "own").origin == "built-in"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import module_that_is_not_there", "module_that_is_not_there"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "no hook"),
        (stage().replace("registry.register(Mine)", "raise ValueError('late')"), "late"),
        (stage().replace("@hookimpl", ""), "not marked"),
    ],
)
def test_one_broken_plugin_never_stops_the_others(site, source, word):
    site.install("broken", source)
    site.install("good", stage("Good", "good"))
    plugins = load()
    assert list(plugins.broken) == ["broken"] and word in str(plugins.broken["broken"])
    assert [w for w in plugins.warnings if "'broken' (distribution broken)" in w and "\n" not in w]
    assert of(plugins, "broken").error and plugins.registry.get("interleaver", "good")
    assert plugins.registry.get("interleaver", "mine") is None


def test_a_plugin_that_is_slow_to_import_is_told_with_the_way_out(site, monkeypatch):
    site.install("good", stage("Good", "good"))
    assert load().warnings == []
    monkeypatch.setattr("flowdflash.plugin.loader.SLOW_IMPORT_SECS", -1.0)
    (warning,) = [text for text in load().warnings if "'good'" in text]
    assert "s to import; --disable-plugin good leaves it out" in warning


def test_the_original_error_is_the_cause(site):
    site.install("broken", "1 / 0")
    assert isinstance(load().broken["broken"].__cause__, ZeroDivisionError)


def test_keyboard_interrupt_while_loading_is_not_swallowed(site):
    site.install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load()


def test_a_broken_built_in_is_raised():
    with pytest.raises(PluginBroken, match="own"):
        load_plugins(builtin=[SimpleNamespace(__name__="own")], entry_points=False)


def test_two_plugins_that_register_one_name_the_second_is_left_out_naming_both(site):
    site.install("aaa", stage())
    site.install("bbb", stage("Theirs"))
    plugins = load()
    assert "'aaa'" in str(plugins.broken["bbb"]) and "'bbb'" in str(plugins.broken["bbb"])
    assert plugins.registry.get("interleaver", "mine").__name__ == "Mine"


def test_two_distributions_with_one_entry_point_name_are_told_apart(site):
    site.install("one", stage("One", "one"), entry="same")
    site.install("two", stage("Two", "two"), entry="same")
    (error,) = load().broken.values()
    assert "distribution one" in str(error) and "distribution two" in str(error)


def test_entry_points_can_be_left_alone(site):
    site.install("good", stage())
    assert load(entry_points=False).infos == []


@pytest.mark.parametrize("name", ["good-one", "good_one", "the-entry"])
def test_a_plugin_is_disabled_by_distribution_or_entry_point(site, name):
    site.install("good-one", stage(), entry="the-entry")
    plugins = load(disabled=[name])
    assert plugins.registry.types() == [] and plugins.broken == {} and plugins.warnings == []
    assert of(plugins, "the-entry").disabled


def test_disabling_what_is_not_there_is_a_warning(site):
    assert load(disabled=["stratifeid"]).warnings == ["'stratifeid' is not installed, so there was nothing to disable"]


def test_missing_because_disabled(site):
    site.install("good", stage())
    text = load(disabled=["good"]).explain_missing("interleaver", "mine")
    assert "'good'" in text and "disabled" in text
    assert not [m for m in sys.modules if m.startswith(f"mod_{site.folder.name}")], "a disabled plugin was imported"


@pytest.mark.parametrize(
    ("requires", "cure"),
    [(('zstd-thing>=1; extra == "fast"',), "pip install 'good[fast]'"), ((), "pip install zstd_thing")],
)
def test_missing_because_an_extra_is_not_installed(site, requires, cure):
    site.install("good", "import zstd_thing\n" + stage(), requires=requires)
    text = load().explain_missing("interleaver", "mine")
    assert "'good'" in text and "'zstd_thing'" in text and "not installed" in text and cure in text


def test_missing_because_the_import_failed_with_the_original_error(site):
    site.install("good", stage() + "\nraise OSError('libfoo.so.1')\n")
    text = load().explain_missing("interleaver", "mine")
    assert "'good'" in text and "could not be loaded" in text and "OSError: libfoo.so.1" in text


def test_missing_because_of_a_typing_error(site):
    site.install("good", stage())
    text = load().explain_missing("interleaver", "mien")
    assert "did you mean 'mine'?" in text and "good" not in text


def test_missing_with_nothing_near_lists_what_there_is(site):
    site.install("good", stage())
    assert "there is mine" in load().explain_missing("interleaver", "zzzzzz")


def test_missing_in_this_kind_but_there_in_another(site):
    site.install("good", stage())
    assert "check `kind`" in load().explain_missing("bucketer", "mine")


def test_missing_because_it_is_an_import_path():
    assert "never an import path" in Plugins().explain_missing("interleaver", "pkg.mod:Class")


def test_missing_names_the_broken_plugins_that_may_have_supplied_it(site):
    site.install("broken", "1 / 0")
    assert "'broken' could not be loaded and may supply it" in load().explain_missing("sink", "elsewhere")


def test_nothing_to_explain_for_a_stage_that_is_there(site):
    site.install("good", stage())
    assert load().explain_missing("interleaver", "mine") is None


def test_a_single_file_with_one_class_and_a_hook_works(tmp_path):
    (tmp_path / "my_order.py").write_text(stage())
    plugins = Plugins()
    plugins.load_file(tmp_path / "my_order.py")
    plugins.load_file(tmp_path / "sub" / ".." / "my_order.py")
    assert plugins.registry.get("interleaver", "mine") and len(plugins.infos) == 1
    assert plugins.infos[0].origin == f"file {tmp_path / 'my_order.py'}"


def test_a_single_file_may_use_dataclasses_and_deferred_annotations(tmp_path):
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass D:\n    x: int\n"
    (tmp_path / "deferred.py").write_text(head + stage())
    Plugins().load_file(tmp_path / "deferred.py")


@pytest.mark.parametrize(
    ("name", "source", "word"),
    [
        ("absent.py", None, "not a Python file"),
        ("notes.txt", "x", "not a Python file"),
        ("wrong.py", "import nothing_like_this", "nothing_like_this"),
        ("bare.py", "x = 1", "registry.register"),
    ],
)
def test_a_file_that_cannot_be_used_is_raised_each_time_and_kept(tmp_path, name, source, word):
    if source is not None:
        (tmp_path / name).write_text(source)
    plugins = Plugins()
    for _ in range(2):
        with pytest.raises(PluginBroken, match=word):
            plugins.load_file(tmp_path / name)
    assert len(plugins.broken) == len(plugins.infos) == 1


def test_a_broken_file_leaves_no_module_behind(tmp_path):
    (tmp_path / "half_way.py").write_text("1 / 0")
    with pytest.raises(PluginBroken):
        Plugins().load_file(tmp_path / "half_way.py")
    assert not [name for name in sys.modules if "half_way" in name]


def test_a_folder_of_plugins_is_loaded_file_by_file(tmp_path):
    (tmp_path / "good.py").write_text(stage())
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "_private.py").write_text("raise SystemExit")
    plugins = load(entry_points=False, plugins_dir=tmp_path)
    assert [i.name for i in plugins.infos] == ["bad", "good"] and list(plugins.broken) == ["bad"]
    assert "'bad'" in plugins.explain_missing("sink", "other")


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(PluginBroken, match="no such folder"):
        load(entry_points=False, plugins_dir=tmp_path / "absent")


def test_files_of_the_same_name_in_two_folders_do_not_replace_each_other(tmp_path):
    for folder, cls in (("a", "First"), ("b", "Second")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "order.py").write_text(stage(cls, cls.lower()))
    plugins = Plugins()
    plugins.load_file(tmp_path / "a" / "order.py")
    with pytest.raises(PluginBroken, match="both have a plugin of this name"):
        plugins.load_file(tmp_path / "b" / "order.py")
    assert plugins.registry.get("interleaver", "first")


def test_first_party_plugins_load_beside_each_other():
    import flowdflash_cross_bucket
    import flowdflash_stratified
    import flowdflash_wandb

    plugins = load_plugins(
        builtin=[flowdflash_stratified, flowdflash_cross_bucket, flowdflash_wandb], entry_points=False
    )
    assert {r.type for r in plugins.registry.types()} >= {"stratified", "tijdeman", "cross_bucket", "wandb"}


def test_the_plugin_layer_imports_neither_torch_nor_the_runtime_nor_stages():
    code = (
        "import sys, flowdflash.plugin.loader, flowdflash.plugin.scaffold, flowdflash.testing, flowdflash_wandb\n"
        "import flowdflash_stratified, flowdflash_cross_bucket\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'wandb', 'networkx') or "
        "m.startswith(('flowdflash.runtime', 'flowdflash.stages', 'flowdflash.config'))]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
