import os
import subprocess
import sys

import pytest

from flowdflash.errors import FlowdflashError
from flowdflash.plugin.loader import Plugins
from flowdflash.plugin.scaffold import USAGE, new_plugin


@pytest.mark.parametrize("kind", list(USAGE))
def test_the_new_plugin_is_complete_and_loads(tmp_path, kind):
    paths = new_plugin("my_own", kind, tmp_path)
    assert {str(p.relative_to(tmp_path / "my_own")) for p in paths} == {
        "pyproject.toml",
        "README.md",
        "my_own.py",
        "tests/test_my_own.py",
    }
    assert not [p for p in paths if "$" in p.read_text()]
    plugins = Plugins()
    plugins.load_file(tmp_path / "my_own" / "my_own.py")
    assert plugins.registry.get(kind, "my_own").__name__ == "MyOwn"


@pytest.mark.timeout(60)
def test_the_tests_of_the_new_plugins_pass_in_their_own_folders(tmp_path):
    folders = []
    for kind in USAGE:
        new_plugin(f"my_{kind}", kind, tmp_path)
        folders.append(tmp_path / f"my_{kind}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    first = subprocess.run(run, cwd=folders[0], env=environment, capture_output=True, text=True, timeout=50)
    assert first.returncode == 0 and "2 passed" in first.stdout, first.stdout + first.stderr
    # The others in one process, to be quick: their modules have names of their own.
    others = [str(folder) for folder in folders[1:]]
    environment["PYTHONPATH"] = os.pathsep.join([*others, environment["PYTHONPATH"]])
    rest = subprocess.run([*run, *others], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    assert rest.returncode == 0 and "6 passed" in rest.stdout, rest.stdout + rest.stderr


def test_the_entry_point_names_the_module(tmp_path):
    import tomllib

    new_plugin("my_order", "interleaver", tmp_path)
    project = tomllib.loads((tmp_path / "my_order" / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["flowdflash"] == {"my_order": "my_order"}
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"] == ["my_order.py"]


@pytest.mark.parametrize(
    "name", ["My", "1st", "a-b", "", "class", "random", "numpy", "flowdflash", "interleaver", "field"]
)
def test_a_name_that_would_not_work_is_refused_and_nothing_is_written(tmp_path, name):
    with pytest.raises(FlowdflashError):
        new_plugin(name, "interleaver", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_kind_without_a_template_is_refused_naming_those_with_one(tmp_path):
    with pytest.raises(FlowdflashError, match="interleaver, bucketer, sink"):
        new_plugin("my_own", "drafter", tmp_path)


def test_what_is_there_is_never_overwritten(tmp_path):
    (tmp_path / "my_order").mkdir()
    with pytest.raises(FlowdflashError, match="exists already"):
        new_plugin("my_order", "interleaver", tmp_path)
