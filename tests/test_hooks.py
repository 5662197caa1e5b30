import inspect
import threading
from types import SimpleNamespace

import pytest

from flowdflash.errors import PluginBroken, Problem
from flowdflash.plugin import hookimpl
from flowdflash.plugin.audit import HOOKS, hook_faults
from flowdflash.plugin.loader import Plugins
from flowdflash.testing import make_records


def plugin(**functions):
    """A stand-in for a module with these functions."""
    module = SimpleNamespace(__name__="plug", **functions)
    for name, function in functions.items():
        function.__name__ = name
    return module


def loaded(*modules):
    plugins = Plugins()
    for number, module in enumerate(modules):
        module.__name__ = f"plug{number}"
        plugins.load_module(module)
    return plugins


def test_there_are_six_hooks_each_with_a_docstring():
    from flowdflash.plugin import hookspecs

    assert set(HOOKS) == {
        "flowdflash_register",
        "flowdflash_check",
        "flowdflash_run_started",
        "flowdflash_step",
        "flowdflash_checkpoint_saved",
        "flowdflash_run_finished",
    }
    assert all(inspect.getdoc(getattr(hookspecs, name)) for name in HOOKS)


def test_flowdflash_register_is_called_with_the_registry():
    seen = []
    plugins = loaded(plugin(flowdflash_register=hookimpl(lambda registry: seen.append(registry))))
    assert seen == [plugins.registry]


def test_flowdflash_check_gathers_the_problems_of_all_plugins():
    first = plugin(flowdflash_check=hookimpl(lambda graph: [Problem(f"bad {graph}")]))
    second = plugin(flowdflash_check=hookimpl(lambda graph: None))
    assert [p.message for p in loaded(first, second).check("graph")] == ["bad graph"]


@pytest.mark.parametrize("fault", [lambda graph: 1 / 0, lambda graph: ["text"], lambda graph: 3])
def test_a_check_that_fails_is_a_problem_that_names_the_plugin(fault):
    problems = loaded(plugin(flowdflash_check=hookimpl(fault)), plugin(flowdflash_check=hookimpl(lambda: None))).check(
        "g"
    )
    assert len(problems) == 1 and "plug0" in problems[0].message and problems[0].severity == "error"


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        ("flowdflash_run_started", {"run": "run"}),
        ("flowdflash_step", {"record": make_records(1)[0]}),
        ("flowdflash_checkpoint_saved", {"checkpoint": "checkpoint"}),
        ("flowdflash_run_finished", {"run": "run", "outcome": "outcome"}),
    ],
)
def test_observers_get_the_arguments_that_they_ask_for(hook, arguments):
    seen = []
    names = ", ".join(arguments)
    full = eval(f"lambda {names}: seen.append(dict({', '.join(f'{n}={n}' for n in arguments)}))", {"seen": seen})
    plugins = loaded(plugin(**{hook: hookimpl(full)}), plugin(**{hook: hookimpl(lambda: seen.append("none"))}))
    assert plugins.notify(hook, **arguments) == []
    assert sorted(map(str, seen)) == sorted([str(arguments), "none"])


def test_notify_refuses_arguments_that_the_hook_does_not_have():
    with pytest.raises(TypeError, match="flowdflash_step takes record"):
        Plugins().notify("flowdflash_step", recrod=1)


@pytest.mark.parametrize("error", [ValueError("no disk"), SystemExit(3)])
def test_a_failing_observer_is_said_once_and_silenced_while_others_go_on(error):
    calls = []

    def fails(record):
        calls.append("bad")
        raise error

    good = plugin(flowdflash_step=hookimpl(lambda record: calls.append("good")))
    plugins = loaded(plugin(flowdflash_step=hookimpl(fails)), good)
    texts = [plugins.notify("flowdflash_step", record=r) for r in make_records(3)]
    assert [len(t) for t in texts] == [1, 0, 0]
    assert "plug0" in texts[0][0] and "flowdflash_step" in texts[0][0] and type(error).__name__ in texts[0][0]
    assert calls.count("bad") == 1 and calls.count("good") == 3


def test_an_observer_that_failed_on_one_hook_still_hears_the_end_of_the_run():
    ended = []
    fails = hookimpl(lambda record: 1 / 0)
    plugins = loaded(plugin(flowdflash_step=fails, flowdflash_run_finished=hookimpl(lambda run: ended.append(run))))
    plugins.notify("flowdflash_step", record=1)
    assert plugins.notify("flowdflash_run_finished", run="r", outcome="o") == [] and ended == ["r"]


def test_keyboard_interrupt_in_an_observer_is_not_swallowed():
    def interrupted(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loaded(plugin(flowdflash_step=hookimpl(interrupted))).notify("flowdflash_step", record=1)


@pytest.mark.timeout(20)
def test_notify_may_be_called_from_many_threads_and_reports_a_failure_at_least_once():
    plugins = loaded(plugin(flowdflash_step=hookimpl(lambda record: 1 / 0)))
    texts, barrier = [], threading.Barrier(4)

    def work():
        barrier.wait()
        for _ in range(20):
            texts.extend(plugins.notify("flowdflash_step", record=1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 1


def unmarked(record):
    pass


def no_such_hook(record):
    pass


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({"flowdflash_on_stpe": hookimpl(no_such_hook)}, ["flowdflash_on_stpe is not a hook", "mean flowdflash_step?"]),
        ({"flow_on_stpe": hookimpl(lambda record: None)}, ["flow_on_stpe is not a hook", "flowdflash_step"]),
        ({"flowdflash_step": unmarked}, ["flowdflash_step", "not marked", "@hookimpl"]),
        ({"flowdflash_setp": lambda record: None}, ["flowdflash_setp", "mean flowdflash_step?"]),
        ({"flowdflash_step": hookimpl(lambda recrod: None)}, ["'recrod'", "mean record?"]),
        ({"flowdflash_step": hookimpl(lambda *args: None)}, ["*args", "record"]),
        ({"flowdflash_step": hookimpl(wrapper=True)(lambda record: (yield))}, ["wrapped"]),
        ({}, ["no hook"]),
    ],
)
def test_a_hook_that_would_never_run_is_an_error_naming_plugin_hook_and_nearest_name(functions, words):
    module = SimpleNamespace(__name__="plug", **functions)
    with pytest.raises(PluginBroken) as caught:
        Plugins().load_module(module)
    assert all(word in str(caught.value) for word in ["'plug'", *words])


def test_an_async_hook_is_refused():
    async def flowdflash_step(record):
        pass

    assert "async" in hook_faults(SimpleNamespace(flowdflash_step=hookimpl(flowdflash_step)))[0]


def test_a_hook_may_have_another_function_name_if_it_says_so():
    seen = []
    module = SimpleNamespace(
        __name__="plug", watch=hookimpl(specname="flowdflash_step")(lambda record: seen.append(record))
    )
    plugins = Plugins()
    plugins.load_module(module)
    plugins.notify("flowdflash_step", record=1)
    assert seen == [1] and plugins.infos[0].hooks == ("flowdflash_step",)
